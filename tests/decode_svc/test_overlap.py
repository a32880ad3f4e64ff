"""Blocks travel while prefill still computes, and a metric says how many did."""

import asyncio

import pytest

from pagewire.v1 import prefill_pb2
from tests.decode_svc.harness import BLOCK_SIZE, NIXL, Gate, cluster, greedy, random_prompt, reference, until


@pytest.mark.parametrize("plane", ["grpc", "tcp", "shm_vm", "shm_map", "shm_ring", NIXL])
async def test_blocks_are_on_decode_before_the_last_chunk(tiny_model, plane):
    """CASES F4: a chunk's blocks are sent after the step that wrote them, and none before."""
    model = tiny_model("llama")
    prompt, params = random_prompt(6 * BLOCK_SIZE, 1), greedy(4)
    ((expected,),) = reference(model, [(prompt, params)])
    options = {"max_num_batched_tokens": 2 * BLOCK_SIZE}
    async with cluster(model, plane=plane, prefill_options=options) as workers:
        gate = Gate(workers.prefill_engine)
        request = workers.request(prompt, params)
        events = aiter(workers.prefill_stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=True)))
        ticket = (await anext(events)).accepted.ticket
        decoding = asyncio.create_task(workers.decode_all(request, ticket))
        keys = workers.decode_engine.kv_cache.keys_for(prompt)
        for num_chunks in (1, 2):
            gate.let()
            await until(lambda n=num_chunks: workers.decode_engine.kv_cache.num_cached == 2 * n)
            assert gate.num_steps == num_chunks
            assert set(workers.decode_engine.kv_cache.cached_keys()) == set(keys[: 2 * num_chunks])
        assert not decoding.done()
        gate.open()
        tokens = [token async for event in events for token in event.first_tokens.tokens]
        assert [token.token_id for token in tokens] == expected[:1]
        assert await decoding == [expected[1:]]
        assert workers.value(workers.decode, "pagewire:transfer_blocks_total") == 6
        assert 4 <= workers.value(workers.decode, "pagewire:transfer_overlap_blocks_total") <= 6
        assert workers.value(workers.decode, "pagewire:transfer_seconds_count") == 1


async def test_without_overlap_the_metric_is_zero(tiny_model):
    async with cluster(tiny_model("llama")) as workers:
        request = workers.request(random_prompt(9, 1), greedy(2))
        await workers.prefill_all(request)
        await asyncio.sleep(0.05)
        await workers.decode_all(request, workers.ticket)
        assert workers.value(workers.decode, "pagewire:transfer_blocks_total") == 3
        assert workers.value(workers.decode, "pagewire:transfer_overlap_blocks_total") == 0
