"""Beam search together with what else a request can ask for, as Hugging Face's with the same restriction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.errors import PagewireError
from pagewire.grammar import GrammarCompiler
from pagewire.sampling import SamplingParams, StructuredOutput
from pagewire.text.tokenizer import Tokenizer
from router.request import BeamSearch, FinishReason, GenerateCall, Piece, PromptLogprobs, TextOptions, TokenPrompt
from tests.matrix.beam_oracle import EOS, PROMPTS, hugging_face, load_oracle
from tests.matrix.system import System, system

SEARCH = BeamSearch(4)
MAX_TOKENS = 10
REGEX = StructuredOutput("regex", "[a-f]{2,6}(x|yz)")
# After each of these three nothing of what is allowed may follow.
DEAD_END = tuple((first, then) for first in (50, 53, 57) for then in range(50, 60))
Allow = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True)
class Case:
    """What we are asked, and how Hugging Face is asked for the same."""

    sampling: dict[str, Any] = field(default_factory=dict)
    text: TextOptions = field(default_factory=TextOptions)
    eos: tuple[int, ...] = EOS
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Case(),
    "logprobs": Case({"logprobs": 3, "prompt_logprobs": 2}),
    "allowed_token_ids": Case({"allowed_token_ids": tuple(range(50, 130))}),
    "bad_words_token_ids": Case(
        {"bad_words_token_ids": ((133,), (192, 151), (38, 139))},
        options={"bad_words_ids": [[133], [192, 151], [38, 139]]},
    ),
    "a beam that nothing may follow": Case(
        {"allowed_token_ids": tuple(range(50, 60)), "bad_words_token_ids": DEAD_END},
        options={"bad_words_ids": [list(words) for words in DEAD_END]},
    ),
    "min_tokens": Case(
        {"min_tokens": 5, "logprobs": 1, "stop_token_ids": (139, 192)},
        eos=(*EOS, 139, 192),
        options={"min_new_tokens": 5},
    ),
    "stop_token_ids": Case({"stop_token_ids": (166, 100)}, eos=(*EOS, 166, 100)),
    "ignore_eos and stop_token_ids": Case({"stop_token_ids": (255, 192), "ignore_eos": True}, eos=(255, 192)),
    "structured_output": Case({"structured_output": REGEX, "logprobs": 2}),
    "stop": Case(text=TextOptions(stop=("b", ")", "zz"))),
    "stop, shown, not before min_tokens": Case(
        {"min_tokens": 4},
        TextOptions(stop=("b", "E", "d"), include_stop_str_in_output=True),
        options={"min_new_tokens": 4},
    ),
}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", eos_token_id=list(EOS))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    return load_oracle(model)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int], *, is_whole: bool = False) -> str:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    text = "".join(detokenizer.push(token_id) for token_id in token_ids)
    return text + detokenizer.flush() if is_whole else text


def wanted_of(oracle: Any, tokenizer: Tokenizer, prompt: list[int], case: Case) -> list[tuple[list[int], float]]:
    options, num_prompt = dict(case.options), len(prompt)
    allow: Allow | None = None
    if allowed := case.sampling.get("allowed_token_ids"):
        allow = lambda output: list(allowed)  # noqa: E731
    if "structured_output" in case.sampling:
        vocab_size = oracle.config.vocab_size
        grammar = GrammarCompiler(lambda: tokenizer, vocab_size, EOS).compile(REGEX)
        allow = lambda output: grammar.start().allowed(output).nonzero()[0].tolist()  # noqa: E731
    if allow is not None:
        options["prefix_allowed_tokens_fn"] = lambda _, row: allow(row.tolist()[num_prompt:])
    stops, min_tokens = case.text.stop, case.sampling.get("min_tokens", 0)

    def is_stopped(token_ids: Sequence[int]) -> bool:
        """A stop string ends in the last token, and that token counts."""
        old, new = text_of(tokenizer, token_ids[:-1]), text_of(tokenizer, token_ids)
        known = len(text_of(tokenizer, token_ids[:min_tokens]))
        starts = (start for stop in stops for start in range(known, len(new)) if new.startswith(stop, start))
        ends = [start + len(stop) for start in starts for stop in stops if new.startswith(stop, start)]
        return len(token_ids) > min_tokens and any(end > len(old) for end in ends)

    return hugging_face(
        oracle, prompt, SEARCH, MAX_TOKENS, eos=case.eos, is_stopped=is_stopped if stops else None, **options
    )


async def outputs_of(running: System, prompt: list[int], case: Case) -> tuple[list[Piece], list[PromptLogprobs]]:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, n=SEARCH.num_beams, **case.sampling)
    call = GenerateCall(TokenPrompt(tuple(prompt)), sampling, case.text, beam_search=SEARCH)
    outputs = [output async for output in running.pipeline.generate(call)]
    prompts = [output for output in outputs if isinstance(output, PromptLogprobs)]
    return [output for output in outputs if isinstance(output, Piece)], prompts


async def test_as_hugging_face(oracle: Any, model: Path, tokenizer: Tokenizer) -> None:
    plain: list[list[list[int]]] = []
    async with system(model, num_prefill=1, num_decode=1) as running:
        for name, case in CASES.items():
            outputs = []
            for prompt in PROMPTS[1:2]:
                pieces, prompt_logprobs = await outputs_of(running, prompt, case)
                wanted = wanted_of(oracle, tokenizer, prompt, case)
                assert [piece.token_ids for piece in pieces] == [ids for ids, _ in wanted], name
                scores = [score for _, score in wanted]
                assert [piece.beam_score for piece in pieces] == pytest.approx(scores, rel=1e-4), name
                for piece in pieces:
                    check_text(tokenizer, piece, case)
                    check_logprobs(oracle, prompt, piece, case.sampling.get("logprobs"))
                check_prompt_logprobs(oracle, prompt, prompt_logprobs, case.sampling.get("prompt_logprobs"))
                outputs.append([piece.token_ids for piece in pieces])
            if not plain:
                plain = outputs
            elif name != "logprobs":
                assert outputs != plain, f"{name} changes nothing"


async def test_no_beam_can_go_on(model: Path) -> None:
    nothing = tuple((first, then) for first in range(50, 60) for then in range(50, 60))
    case = Case({"allowed_token_ids": tuple(range(50, 60)), "bad_words_token_ids": nothing})
    async with system(model, num_prefill=1, num_decode=1) as running:
        with pytest.raises(
            PagewireError, match=r"^sampling\.allowed_token_ids = .* leaves no beam a token to draw after 1"
        ):
            await outputs_of(running, PROMPTS[1], case)


def check_text(tokenizer: Tokenizer, piece: Piece, case: Case) -> None:
    ends = piece.token_ids[-1] in case.eos
    if not piece.stop_reason:
        assert piece.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)
        shown = piece.token_ids[:-1] if ends and not case.text.include_stop_str_in_output else piece.token_ids
        assert piece.text == text_of(tokenizer, shown, is_whole=True)
        return
    assert piece.finish_reason is FinishReason.STOP
    assert piece.stop_reason in case.text.stop
    shown_stop = "" if case.text.include_stop_str_in_output else piece.stop_reason
    assert text_of(tokenizer, piece.token_ids) == piece.text + shown_stop
    assert (piece.text + shown_stop).endswith(piece.stop_reason)


def logprobs_after(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(oracle(torch.tensor([token_ids])).logits[0].float(), dim=-1)


def check_logprobs(oracle: Any, prompt: list[int], piece: Piece, num_top: int | None) -> None:
    """The model's own, whatever may be drawn."""
    if num_top is None:
        assert not piece.logprobs
        return
    right = logprobs_after(oracle, [*prompt, *piece.token_ids])[len(prompt) - 1 : -1]
    assert len(piece.logprobs) == len(piece.token_ids)
    for row, token_id, found in zip(right, piece.token_ids, piece.logprobs, strict=True):
        assert found.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert len(found.top) <= num_top
        for other, value in found.top:
            assert value == pytest.approx(float(row[other]), abs=1e-4)
        if found.rank <= len(found.top):
            assert found.top[found.rank - 1][0] == token_id


def check_prompt_logprobs(oracle: Any, prompt: list[int], found: list[PromptLogprobs], num_top: int | None) -> None:
    entries = [entry for part in found for entry in part.entries]
    assert len(entries) == (0 if num_top is None else len(prompt) - 1)
    right = logprobs_after(oracle, prompt)
    for row, token_id, entry in zip(right, prompt[1:], entries, strict=False):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
