"""A quantized KV cache travels: on every plane with the tokens of one process, and never to who stores it otherwise."""

import re
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import prefill_pb2
from tests.decode_svc.harness import NIXL, cluster, greedy, random_prompt, reference

OPTIONS = {"kernels": "torch", "kv_cache_dtype": "int8"}


@pytest.mark.parametrize("plane", ["grpc", "tcp", "shm_vm", "shm_map", "shm_ring", NIXL])
async def test_every_plane(tiny_model: Callable[..., Path], plane: str) -> None:
    model = tiny_model("llama")
    work = [(random_prompt(length, length), greedy(5)) for length in (3, 8, 17)]
    expected = reference(model, work, **OPTIONS)
    async with cluster(model, plane=plane, prefill_options=OPTIONS, decode_options=OPTIONS) as workers:
        for _ in range(2):
            assert [await workers.run(*each) for each in work] == expected
        assert [peer.plane.name.lower() for peer in workers.decode.worker.peers.connected()] == [plane]
        assert workers.value(workers.decode, "pagewire:transfer_blocks_total") > 0
        assert workers.prefill_engine.memory.layout.kv_format == "int8"


@pytest.mark.parametrize(("of_prefill", "of_decode"), [("int8", "auto"), ("fp8", "int8")])
async def test_workers_that_store_it_otherwise_take_none_from_each_other(
    tiny_model: Callable[..., Path], of_prefill: str, of_decode: str
) -> None:
    model = tiny_model("llama")
    prefill, decode = ({"kernels": "torch", "kv_cache_dtype": name} for name in (of_prefill, of_decode))
    async with cluster(model, prefill_options=prefill, decode_options=decode) as workers:
        request = workers.request(random_prompt(21, 1), greedy(8))
        await workers.prefill_all(request)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await workers.decode_all(request, workers.ticket)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        names = {"int8": "int8", "fp8": "fp8_e4m3", "auto": "float32"}
        layouts = re.findall(r"layout=\S+/(\w+)", refusal.value.details() or "")
        assert sorted(layouts) == sorted((names[of_prefill], names[of_decode])), refusal.value.details()
        await workers.prefill_stub.ReleaseTicket(prefill_pb2.ReleaseTicketRequest(ticket=workers.ticket))
