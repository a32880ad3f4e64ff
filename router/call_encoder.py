"""From what a client asks to what workers do: token ids, every default filled in, block keys, where text may stop."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace

from pagewire.errors import InvalidArgument, Unavailable
from pagewire.text.stop import StopMatcher
from pagewire.wire import validate_sampling
from pagewire.worker_view import AdapterLabel
from router.adapters import resolve_adapter
from router.choice import ChoiceOutput
from router.constraints import ConstraintEncoder
from router.generation import Generation
from router.model import ModelFacts
from router.placement import Limits, Placer
from router.prompt import PromptEncoder
from router.request import GenerateCall, WorkerCall
from router.validate import resolve_max_tokens, truncated, validate_length


class CallEncoder:
    """Calls must be validated. `prompts` tokenizes; `close` ends its threads."""

    def __init__(self, model: ModelFacts, placer: Placer, adapters: Callable[[], Mapping[str, AdapterLabel]]) -> None:
        self._model = model
        self._adapters = adapters
        self._placer = placer
        self.prompts = PromptEncoder(model)
        self._constraints = ConstraintEncoder(model.tokenizer)

    def close(self) -> None:
        self.prompts.close()
        self._constraints.close()

    def max_model_len(self) -> int:
        """Longest sequence that the model and the workers take now."""
        limits = self._placer.limits()
        return self._model.max_model_len if limits is None else min(self._model.max_model_len, limits.max_model_len)

    async def worker_call(self, call: GenerateCall) -> WorkerCall:
        """Tokenized, with every default filled in."""
        prompt = call.prompt
        if prompt is None:
            raise InvalidArgument("prompt", None, "is missing: set one of text, chat, tokens")
        max_model_len, truncate = self.max_model_len(), call.truncate_prompt_tokens
        token_ids = await self.prompts.encode(prompt, max_tokens=max_model_len - 1 if truncate is None else None)
        token_ids = truncated(token_ids, truncate, call.sampling.max_tokens, max_model_len)
        if not token_ids:
            raise InvalidArgument("prompt", None, "has no tokens")
        validate_length("prompt", len(token_ids), max_model_len)
        max_tokens = resolve_max_tokens(
            call.sampling.max_tokens,
            num_prompt_tokens=len(token_ids),
            max_model_len=max_model_len,
            fits=_most_output_tokens(self._placer.limits(), len(token_ids), _num_sequences(call)),
        )
        if call.sampling.min_tokens > max_tokens:
            limit = f"must be at most {max_tokens}, the number of output tokens that fit"
            raise InvalidArgument("sampling.min_tokens", call.sampling.min_tokens, limit)
        seed = secrets.randbits(64) if call.sampling.seed is None else call.sampling.seed
        sampling = replace(call.sampling, max_tokens=max_tokens, seed=seed)
        if call.best_of is not None:
            sampling = replace(sampling, n=call.best_of, logprobs=sampling.logprobs or 0)
        if call.text_options.bad_words:
            words = await self._constraints.bad_words(call.text_options.bad_words)
            sampling = replace(sampling, bad_words_token_ids=(*sampling.bad_words_token_ids, *words))
            validate_sampling(sampling, vocab_size=self._model.vocab_size, max_model_len=max_model_len)
        if sampling.structured_output is not None:
            await self._constraints.check(sampling.structured_output)
        adapter = resolve_adapter(call.adapter, call.model, self._model.name, self.adapters_for(call))
        return WorkerCall(
            secrets.token_hex(16),
            self._model.name,
            token_ids,
            sampling,
            call.cache_salt,
            call.priority,
            call.tenant or call.cache_salt,
            call.traceparent,
            adapter=adapter,
            keys=await self.prompts.keys(token_ids, call.cache_salt, self._placer.key_spaces(), adapter),
            session_id=call.session_id,
        )

    def adapters_for(self, call: GenerateCall) -> Mapping[str, AdapterLabel]:
        """None of them for the model itself: they need not be looked up then. Raises Unavailable if nobody knows."""
        if not call.adapter and call.model in ("", self._model.name):
            return {}
        adapters = self._adapters()
        if not adapters and self._placer.limits() is None:
            raise Unavailable(f"no worker can serve now, so {(call.adapter or call.model)[:200]!r} can't be looked up")
        return adapters

    def generation(self, call: GenerateCall, worker_call: WorkerCall) -> Generation:
        sampling, options = worker_call.sampling, call.text_options
        return Generation(
            [
                ChoiceOutput(
                    number,
                    self._model.tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens),
                    StopMatcher(options.stop, include_in_output=options.include_stop_str_in_output),
                    max_tokens=sampling.max_tokens or 1,
                    min_tokens=sampling.min_tokens,
                    show_stop_token=options.include_stop_str_in_output,
                )
                for number in range(sampling.n)
            ],
            num_prompt_logprobs=0 if sampling.prompt_logprobs is None else len(worker_call.prompt_token_ids) - 1,
        )


def _num_sequences(call: GenerateCall) -> int:
    if call.beam_search is not None:
        return call.beam_search.num_beams
    return call.best_of or call.sampling.n


def _most_output_tokens(limits: Limits | None, num_prompt_tokens: int, num_choices: int) -> int:
    """Output tokens per choice for which the pool of a decode worker has room; full prompt blocks are shared."""
    if limits is None:
        return 1 << 30
    num_shared = num_prompt_tokens // limits.block_size
    num_blocks = limits.num_pool_tokens // limits.block_size
    return (num_shared + (num_blocks - num_shared) // num_choices) * limits.block_size - num_prompt_tokens
