"""Quantized models on every path: {one process, with preemption, 1P1D with a migration}, and P and D that differ."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kernels import cpu
from pagewire.sampling import SamplingParams
from pagewire.v1 import prefill_pb2
from router.request import GenerateCall, TokenPrompt
from tests.decode_svc.harness import cluster, greedy, make_engine, random_prompt
from tests.matrix.system import in_one_process, system
from tests.quantized_checkpoints import gptq, quantized_copy

KERNELS = "native" if cpu.available() else "torch"
PROMPT = random_prompt(21, seed=1)
FREE = SamplingParams(max_tokens=14, ignore_eos=True, seed=11, logprobs=2, prompt_logprobs=1)
WORK = {
    "greedy": replace(FREE, temperature=0.0),
    "n": replace(FREE, n=2),
    "penalties": replace(FREE, repetition_penalty=1.3),
}


@pytest.mark.parametrize("quantization", ["int8", "w8a8", "gptq"])
async def test_quantized_output_is_the_same_on_every_path(
    tiny_model: Callable[..., Path], tmp_path: Path, quantization: str
) -> None:
    model = tiny_model("llama")
    options: dict[str, Any] = {"kernels": KERNELS}
    if quantization == "gptq":
        model, _ = quantized_copy(model, tmp_path, gptq(group_size=-1, act_order=True))
    else:
        options["quantization"] = quantization
    engine = make_engine(model, enable_prefix_caching=False, **options)
    expected = {name: in_one_process(engine, {name: (PROMPT, params)})[name] for name, params in WORK.items()}
    engine.close()
    engine = make_engine(model, num_blocks=14, max_model_len=48, **options)
    found = in_one_process(engine, {name: (PROMPT, params) for name, params in WORK.items()})
    assert engine.scheduler.num_preemptions > 0, "the pool was too large to show anything"
    engine.close()
    assert found == expected
    async with system(model, num_prefill=1, num_decode=2, **options) as running:
        for name, params in WORK.items():
            result = await running.generate(GenerateCall(TokenPrompt(tuple(PROMPT)), params), break_after=5)
            for choice in result.choices.values():
                choice.text = ""
            assert result == expected[name], name
        assert running.num_migrations >= len(WORK)


async def test_workers_of_different_quantization_take_no_kv_from_each_other(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    prefill, decode = ({"kernels": KERNELS, "quantization": quantization} for quantization in ("w8a8", "int8"))
    async with cluster(model, prefill_options=prefill, decode_options=decode) as workers:
        request = workers.request(PROMPT, greedy(8))
        await workers.prefill_all(request)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await workers.decode_all(request, workers.ticket)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert re.search(r"KV does not fit: .*float32\+w8a8/.*float32\+int8/", refusal.value.details() or "")
        await workers.prefill_stub.ReleaseTicket(prefill_pb2.ReleaseTicketRequest(ticket=workers.ticket))
