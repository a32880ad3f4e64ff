"""Workers and grammars: compiled off the device's thread, refused by name, nothing left behind."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.sampling import SamplingParams, StructuredOutput
from pagewire.v1 import decode_pb2, prefill_pb2
from tests.decode_svc.harness import cluster, greedy, random_prompt, reference, until

PROMPT = random_prompt(9, 1)
BAD = SamplingParams(max_tokens=4, seed=1, structured_output=StructuredOutput("regex", "(a"))
SLOW = SamplingParams(max_tokens=8, seed=1, structured_output=StructuredOutput("regex", "(ab|cd)+;"))


class _Held:
    """A compiler that waits until it is let go."""

    def __init__(self, engine: Any) -> None:
        self._compile = engine.grammars.compile
        self.may_go, self.is_called = threading.Event(), threading.Event()
        engine.grammars.compile = self

    def __call__(self, structure: StructuredOutput) -> Any:
        self.is_called.set()
        assert self.may_go.wait(60)
        return self._compile(structure)


async def test_a_bad_grammar_is_the_callers_fault(tiny_model: Callable[..., Path]) -> None:
    async with cluster(tiny_model("llama")) as running:
        request = running.request(PROMPT, BAD)
        with pytest.raises(grpc.aio.AioRpcError) as on_prefill:
            await running.prefill_all(request)
        with pytest.raises(grpc.aio.AioRpcError) as on_decode:
            await running.decode_all(running.request(PROMPT, BAD), None)
        for refused in (on_prefill, on_decode):
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "params.structured_output.regex" in (refused.value.details() or "")


async def test_nobody_waits_for_a_compiler(tiny_model: Callable[..., Path]) -> None:
    """While one request's grammar is compiled, others run; aborted meanwhile, it leaves nothing."""
    model = tiny_model("llama")
    async with cluster(model) as running:
        held = _Held(running.decode_engine)
        slow = asyncio.ensure_future(running.decode_all(running.request(PROMPT, SLOW), None))
        await until(held.is_called.is_set)
        quick = greedy(6)
        assert await running.decode_all(running.request(PROMPT, quick), None) == reference(model, [(PROMPT, quick)])[0]
        assert not slow.done()
        gone = running.decode_stub.Decode(decode_pb2.DecodeRequest(request=running.request(PROMPT, SLOW)))
        await asyncio.sleep(0.1)
        gone.cancel()
        held.may_go.set()
        assert await slow == reference(model, [(PROMPT, SLOW)])[0]


async def test_aborted_with_its_kv_in_hand(tiny_model: Callable[..., Path]) -> None:
    """The KV has come already when the request is cancelled under its compiler: its blocks are given back."""
    async with cluster(tiny_model("llama")) as running:
        request = running.request(PROMPT, SLOW)
        await running.prefill_all(request)
        held = _Held(running.decode_engine)
        call = running.decode_stub.Decode(
            decode_pb2.DecodeRequest(request=request, source=running.source(running.ticket))
        )
        await until(held.is_called.is_set)
        call.cancel()
        held.may_go.set()
        await until(lambda: running.decode_engine.kv_cache.num_referenced == 0)


async def test_prompt_logprobs_come_before_the_first_token(tiny_model: Callable[..., Path]) -> None:
    async with cluster(tiny_model("llama")) as running:
        prompt = random_prompt(40, 2)
        params = greedy(2, prompt_logprobs=1)
        request = running.request(prompt, params)
        call = running.prefill_stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=False))
        events = [event async for event in call]
        found = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
        assert len(found) > 1, "it was computed in chunks"
        assert [part.start for part in found] == [1, *(1 + sum(len(p.entries) for p in found[:i]) for i in (1, 2))]
        assert sum(len(part.entries) for part in found) == 39
        assert events[-1].HasField("first_tokens")
        assert events[-1].first_tokens.num_cached_tokens == 0
        local = decode_pb2.DecodeRequest(request=running.request(prompt, params))
        answers = [answer async for answer in running.decode_stub.Decode(local)]
        kinds = [answer.WhichOneof("event") for answer in answers]
        assert kinds == sorted(kinds, key=["accepted", "prompt_logprobs", "token"].index)
        mine = [entry for answer in answers for entry in answer.prompt_logprobs.entries]
        assert mine == [entry for part in found for entry in part.entries]
