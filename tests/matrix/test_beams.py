"""Beam search equals Hugging Face's `generate(num_beams=…)`: its rules alone, and run on workers, also migrating."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offline.local import LocalBackend
from pagewire.config import EngineOptions
from pagewire.errors import InvalidArgument
from pagewire.sampling import SamplingParams
from router.beams import BeamState
from router.pipeline import Pipeline
from router.request import BeamSearch, GenerateCall, Piece, Summary, TokenPrompt
from tests.matrix.beam_oracle import EOS, PROMPTS, hugging_face, load_oracle
from tests.matrix.system import system
from tests.offline.models import OPTIONS

SEARCHES = [
    BeamSearch(2),
    BeamSearch(4),
    BeamSearch(4, length_penalty=0.0),
    BeamSearch(3, length_penalty=2.5, early_stopping=True),
    BeamSearch(4, length_penalty=-1.0),
    BeamSearch(3, length_penalty=1.5, early_stopping=None),
    BeamSearch(3, length_penalty=-0.5, early_stopping=None),
    BeamSearch(5, early_stopping=True),
]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", eos_token_id=list(EOS))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    return load_oracle(model)


def by_the_rules(oracle: Any, prompt: list[int], search: BeamSearch, max_tokens: int) -> BeamState:
    """Our rules on Hugging Face's logits, without any worker."""
    state = BeamState(search, max_tokens, frozenset(EOS))
    while not state.is_done:
        rows = torch.tensor([[*prompt, *beam.token_ids] for beam in state.beams])
        with torch.inference_mode():
            logprobs = torch.log_softmax(oracle(rows).logits[:, -1].float(), dim=-1)
        best = logprobs.topk(state.num_candidates)
        state.advance(
            [
                tuple(zip(ids, values, strict=True))
                for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        )
    return state


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_the_rules_as_written_are_hugging_faces(oracle: Any, search: BeamSearch) -> None:
    for prompt in PROMPTS:
        state = by_the_rules(oracle, prompt, search, 14)
        wanted = hugging_face(oracle, prompt, search, 14)
        assert [list(found.token_ids) for found in state.finished] == [ids for ids, _ in wanted]
        assert [found.score for found in state.finished] == pytest.approx([score for _, score in wanted], rel=1e-4)


def test_the_oracle_has_outputs_that_end_early(oracle: Any) -> None:
    lengths = [len(ids) for prompt in PROMPTS for ids, _ in hugging_face(oracle, prompt, BeamSearch(4, 0.0), 14)]
    assert min(lengths) < max(lengths) == 14


async def outputs_of(pipeline: Pipeline, search: BeamSearch, max_tokens: int, ignore_eos: bool) -> list[Piece]:
    sampling = SamplingParams(max_tokens=max_tokens, n=2, ignore_eos=ignore_eos)
    call = GenerateCall(TokenPrompt(tuple(PROMPTS[1])), sampling, beam_search=search)
    *outputs, summary = [output async for output in pipeline.generate(call)]
    pieces = [output for output in outputs if isinstance(output, Piece)]
    assert isinstance(summary, Summary)
    assert (summary.prompt_tokens, summary.completion_tokens) == (
        len(PROMPTS[1]), sum(len(piece.token_ids) for piece in pieces)
    )  # fmt: skip
    assert summary.total_ms >= summary.ttft_ms > 0
    return pieces


def check(oracle: Any, pieces: list[Piece], search: BeamSearch, max_tokens: int, ignore_eos: bool) -> None:
    wanted = hugging_face(oracle, PROMPTS[1], search, max_tokens, eos=() if ignore_eos else EOS)[:2]
    assert [piece.token_ids for piece in pieces] == [ids for ids, _ in wanted]
    assert [piece.beam_score for piece in pieces] == pytest.approx([score for _, score in wanted], rel=1e-4)


async def test_on_an_engine_in_this_process(oracle: Any, model: Path) -> None:
    """And however long the output: of the steps before the last nothing is kept."""
    backend = LocalBackend.load(EngineOptions(model=str(model), **OPTIONS))
    start, lives, num_kept = backend._lives._start_life, list[Any](), list[int]()

    def start_and_count(*arguments: Any) -> Any:
        gc.collect()
        num_kept.append(sum(life() is not None for life in lives))
        life = start(*arguments)
        lives.append(weakref.ref(life))
        return life

    backend._lives._start_life = start_and_count
    await backend.begin()
    try:
        for search, ignore_eos in ((SEARCHES[1], False), (SEARCHES[5], False), (SEARCHES[0], True)):
            check(oracle, await outputs_of(backend, search, 8, ignore_eos), search, 8, ignore_eos)
    finally:
        await backend.end()
    assert len(num_kept) > 12
    assert max(num_kept) <= 1


@pytest.mark.parametrize(("num_prefill", "num_decode", "migrates"), [(1, 1, False), (2, 2, True)])
async def test_beams_on_workers_are_hugging_faces(
    oracle: Any, model: Path, num_prefill: int, num_decode: int, migrates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with system(model, num_prefill=num_prefill, num_decode=num_decode) as running:
        if migrates:
            break_each_step(running, monkeypatch)
        for search, ignore_eos in ((SEARCHES[1], False), (SEARCHES[5], False), (SEARCHES[0], True)):
            check(oracle, await outputs_of(running.pipeline, search, 8, ignore_eos), search, 8, ignore_eos)
        assert bool(running.num_migrations) == migrates


def break_each_step(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step's decode session is cut before it brings a token."""
    import router.life

    start, num_starts = router.life.Life._start_decode, 0

    def start_and_break(self: Any, source: Any) -> None:
        nonlocal num_starts
        start(self, source)
        num_starts += 1
        if num_starts % 3 == 2:
            asyncio.get_running_loop().call_later(0.002, self._session._task.cancel)

    monkeypatch.setattr(router.life.Life, "_start_decode", start_and_break)


async def test_what_beams_refuse(model: Path) -> None:
    async with system(model, num_prefill=1, num_decode=1) as running:
        for search, fields, named in (
            (BeamSearch(1), {}, "beam_search.num_beams"),
            (BeamSearch(17), {}, "beam_search.num_beams"),
            (BeamSearch(2), {"n": 3}, "sampling.n"),
            (BeamSearch(2), {"temperature": 0.5}, "sampling.temperature = 0.5: is not supported"),
            (BeamSearch(2), {"top_k": 5}, "sampling.top_k = 5: is not supported"),
            (BeamSearch(2), {"frequency_penalty": 1.0}, "sampling.frequency_penalty: is not supported"),
            (BeamSearch(2), {"logit_bias": {5: 1.0}}, "sampling.logit_bias"),
            (BeamSearch(16), {"stop_token_ids": (5,)}, "beam_search.num_beams"),
            (BeamSearch(2, length_penalty=float("nan")), {}, "beam_search.length_penalty"),
        ):
            sampling = SamplingParams(max_tokens=4, **fields)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument) as refused:
                async for _ in running.pipeline.generate(
                    GenerateCall(TokenPrompt((10, 11)), sampling, beam_search=search)
                ):
                    pass
            assert refused.value.message.startswith(named)
