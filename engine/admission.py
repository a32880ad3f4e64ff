"""What a request must fulfil to ever run, and the sequences it starts as. Pure; may be called from any thread."""

from dataclasses import dataclass

from engine.errors import RequestRefused
from engine.request import AdoptedKv, EngineRequest
from engine.sequence import Sequence
from kvstore.kv_groups import HeldBlocks, KvGroups

Branch = tuple[int, tuple[int, ...]]
"""A choice and its output so far."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. `eos_token_ids` end a choice unless `ignore_eos`; vocab_size 0 checks no token ids.

    `max_loras` adapters may run at once; 0: none is served.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int = 0
    max_loras: int = 0

    def __post_init__(self) -> None:
        if min(self.max_num_batched_tokens, self.max_num_seqs, self.block_size, self.max_model_len) < 1:
            raise ValueError(f"every limit must be at least 1: {self}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence takes part in every step"
            )


def check_request(
    request: EngineRequest, config: SchedulerConfig, num_blocks: int, groups: KvGroups | None = None
) -> None:
    """Raises RequestRefused if the request is malformed or can never fit; `max_model_len` tokens fit the pool."""
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise RequestRefused("prompt_token_ids", "must not be empty", value=0, limit=1)
    if params.n < 1:
        raise RequestRefused("params.n", f"must be at least 1, got {params.n}", value=params.n, limit=1)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise RequestRefused(
            "params.max_tokens", f"must be at least 1, got {params.max_tokens}", value=params.max_tokens, limit=1
        )
    if request.adapter is not None and not config.max_loras:
        raise RequestRefused("adapter", f"{request.adapter.name!r}: this engine serves no adapters (enable_lora)")
    if not request.ids_are_checked:
        _check_token_ids("prompt_token_ids", prompt, config.vocab_size)
    _check_choices(request, config)
    branches = open_branches(request)
    if not branches:
        raise RequestRefused("choices", "every choice is finished, there is nothing to generate")
    longest = len(prompt) + max(len(output) for _, output in branches)
    if longest + 1 > config.max_model_len:
        raise RequestRefused(
            "prompt_token_ids",
            f"{longest} tokens leave no room for a new one within max_model_len {config.max_model_len} "
            f"(the pool has {num_blocks} blocks of {config.block_size} tokens)",
            value=longest,
            limit=config.max_model_len - 1,
        )
    _check_adopted(request, config, branches, groups)


def _check_token_ids(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if vocab_size and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestRefused(
            field, f"token id {bad} is outside the vocabulary of {vocab_size}", value=bad, limit=vocab_size - 1
        )


def _check_choices(request: EngineRequest, config: SchedulerConfig) -> None:
    max_tokens, seen = request.params.max_tokens, set()
    for state in request.choices:
        if not 0 <= state.choice < request.params.n or state.choice in seen:
            raise RequestRefused(
                "choices", f"choice {state.choice} is listed twice or not below n = {request.params.n}"
            )
        seen.add(state.choice)
        if state.output_token_ids and not request.ids_are_checked:
            _check_token_ids("choices", state.output_token_ids, config.vocab_size)
        num_outputs = len(state.output_token_ids)
        if max_tokens is not None and not state.finished and num_outputs >= max_tokens:
            raise RequestRefused(
                "choices",
                f"choice {state.choice} has {num_outputs} output tokens, max_tokens is {max_tokens}",
                value=num_outputs,
                limit=max_tokens - 1,
            )


def _check_adopted(
    request: EngineRequest, config: SchedulerConfig, branches: list[Branch], groups: KvGroups | None
) -> None:
    adopted = request.adopted
    if adopted is None:
        return
    shared = len(request.prompt_token_ids) + (len(branches[0][1]) if len(branches) == 1 else 0)
    if groups is not None and not groups.is_plain:
        # As `Scheduler._adopt`: unless it forks at once, the last token is computed again.
        forks_at_once = len(branches) > 1 and not request.prefill_only and all(output for _, output in branches)
        _check_adopted_groups(adopted, groups, min(adopted.num_tokens, shared - (not forks_at_once)))
    num_blocks = adopted.first_block + len(adopted.block_ids)
    if not 0 <= adopted.num_tokens <= min(shared, num_blocks * config.block_size):
        raise RequestRefused(
            "adopted",
            f"{len(adopted.block_ids)} blocks of {config.block_size} tokens cannot hold {adopted.num_tokens} "
            f"of the {shared} tokens that the choices share",
            value=adopted.num_tokens,
            limit=shared,
        )


def _check_adopted_groups(adopted: AdoptedKv, groups: KvGroups, next_token: int) -> None:
    """`next_token`: the position of the first that is computed here."""
    held = (HeldBlocks(adopted.first_block, adopted.block_ids), *adopted.others)
    if len(held) != len(groups):
        raise RequestRefused("adopted", f"has {len(held)} KV groups, the model {len(groups)}", value=len(held))
    end, wanted = groups.num_blocks_for(adopted.num_tokens), groups.first_blocks(next_token)
    for group, (blocks, first) in enumerate(zip(held, wanted, strict=True)):
        if blocks.first > first or blocks.end < end:
            raise RequestRefused(
                "adopted",
                f"KV group {group} has blocks {blocks.first} … {blocks.end - 1} of {adopted.num_tokens} tokens; "
                f"the next one needs {first} … {end - 1}",
                value=blocks.first,
                limit=first,
            )


def open_branches(request: EngineRequest) -> list[Branch]:
    """Every choice that is to be continued, with its output so far (none for choices that are not listed)."""
    states = {state.choice: state for state in request.choices}
    branches: list[Branch] = []
    for choice in range(request.params.n):
        state = states.get(choice)
        if state is None:
            branches.append((choice, ()))
        elif not state.finished:
            branches.append((choice, state.output_token_ids))
    return branches


def num_tokens_of_work(request: EngineRequest, max_model_len: int) -> int:
    """Tokens to compute if nothing is cached and every choice becomes as long as it may."""
    prompt, branches = len(request.prompt_token_ids), open_branches(request)
    if request.prefill_only:
        return prompt + len(branches)
    most = max_model_len - prompt
    if request.params.max_tokens is not None:
        most = min(most, request.params.max_tokens)
    return prompt + most * len(branches)


def starting_sequences(request: EngineRequest, arrival: int) -> list[Sequence]:
    """What the request starts as: one sequence, a trunk that will fork, or (nothing to share) one for each choice.

    A fresh trunk computes the prompt and samples every choice's first token. A trunk of choices that have output
    computes what they share and samples nothing; if one of them has no output yet it leaves the prompt's last token
    to the branches, since that token's forward is what they sample from. Prompt log-probabilities are a fresh
    request's: whoever has output or somebody else's KV has them already.
    """
    sequences = _starting_sequences(request, arrival)
    if request.params.prompt_logprobs is not None and not request.choices and request.adopted is None:
        sequences[0].wants_prompt_logprobs = len(request.prompt_token_ids) > 1
    return sequences


def _starting_sequences(request: EngineRequest, arrival: int) -> list[Sequence]:
    prompt, branches = list(request.prompt_token_ids), open_branches(request)
    choices = tuple(choice for choice, _ in branches)
    if len(branches) == 1:
        (choice, output), *_ = branches
        return [Sequence(request, arrival, choice, prompt + list(output), choices_to_sample=choices)]
    if not any(output for _, output in branches):
        kept = () if request.prefill_only else tuple(branches)
        return [Sequence(request, arrival, choices[0], prompt, branches=kept, choices_to_sample=choices)]
    if request.prefill_only:
        return [Sequence(request, arrival, choices[0], prompt)]
    if all(output for _, output in branches):
        return [Sequence(request, arrival, choices[0], prompt, branches=tuple(branches))]
    if len(prompt) > 1:
        return [Sequence(request, arrival, choices[0], prompt[:-1], branches=tuple(branches))]
    return [Sequence(request, arrival, c, prompt + list(out), choices_to_sample=(c,)) for c, out in branches]
