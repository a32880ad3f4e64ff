"""The workers' facade of VllmEngine, in one process: what it makes of a call's metadata."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.request import EngineRequest
from pagewire import rpc
from pagewire.foreign.smg import vllm_engine_pb2 as pb
from pagewire.foreign.smg.vllm_engine_pb2_grpc import VllmEngineStub
from tests.decode_svc.harness import cluster


async def test_requests_count_against_the_tenant_of_the_metadata(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[EngineRequest] = []

    def watch(worker: Any, name: str) -> None:
        method = getattr(worker, name)

        def watched(request: EngineRequest, *arguments: Any, **options: Any) -> Any:
            seen.append(request)
            return method(request, *arguments, **options)

        monkeypatch.setattr(worker, name, watched)

    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]), sampling_params=pb.SamplingParams(max_tokens=1)
    )
    async with cluster(tiny_model("llama")) as workers:
        watch(workers.prefill.worker, "prefill")
        watch(workers.decode.worker, "submit")
        for app in (workers.prefill, workers.decode):
            async with rpc.channel(app.description.endpoint) as channel:
                for metadata in ((("x-tenant", "t" * 200),), ()):
                    stream = VllmEngineStub(channel).Generate(request, metadata=metadata)
                    assert await stream.read() is not grpc.aio.EOF
                    assert await stream.read() is grpc.aio.EOF
    assert [each.tenant for each in seen] == ["t" * 128, ""] * 2
