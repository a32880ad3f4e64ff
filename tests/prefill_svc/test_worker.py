"""Prefill over stubs: order of events, cancel within a chunk, leases by an injected clock, bounded admission."""

import asyncio

import grpc
import pytest

from engine.kv_cache import KvCache
from engine.request import HeldKv, PrefillProgress, StepOutput
from kvstore.block_pool import BlockPool
from pagewire.v1 import prefill_pb2, transfer_pb2, transfer_pb2_grpc, types_pb2
from prefill_svc.manifests import BlockCollector
from tests.decode_svc.harness import BLOCK_SIZE, Gate, cluster, greedy, random_prompt, reference, until


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


def prefill(workers, request, hand_off=True):
    return workers.prefill_stub.Prefill(prefill_pb2.PrefillRequest(request=request, hand_off=hand_off))


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in call:
            pass
    return error.value.code(), error.value.details()


async def test_order_of_events(model):
    prompt = random_prompt(20, 1)
    ((first,),) = reference(model, [(prompt, greedy(1))])
    async with cluster(model, prefill_options={"max_num_batched_tokens": 8}) as workers:
        events = [event async for event in prefill(workers, workers.request(prompt, greedy(5)))]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "accepted"
        assert kinds[-1] == "first_tokens"
        assert set(kinds[1:-1]) == {"progress"}
        assert len(events[0].accepted.ticket) == 16
        computed = [event.progress.num_computed_tokens for event in events[1:-1]]
        assert computed == sorted(computed)
        assert computed[-1] == 20
        assert [token.token_id for token in events[-1].first_tokens.tokens] == first
        again = [event async for event in prefill(workers, workers.request(prompt, greedy(5)))]
        assert again[-1].first_tokens.num_cached_tokens == 19
        for ticket in (events[0].accepted.ticket, again[0].accepted.ticket):
            released = await workers.prefill_stub.ReleaseTicket(prefill_pb2.ReleaseTicketRequest(ticket=ticket))
            assert released.released
            released = await workers.prefill_stub.ReleaseTicket(prefill_pb2.ReleaseTicketRequest(ticket=ticket))
            assert not released.released


async def test_a_router_that_never_saw_the_ticket_releases_it_by_request(model):
    """Cancelled between the worker's last word and its arrival: nothing else would end the lease for 30 s."""
    async with cluster(model) as workers:
        request = workers.request(random_prompt(20, 7), greedy(5))
        events = [event async for event in prefill(workers, request)]
        assert events[0].accepted.ticket
        release = prefill_pb2.ReleaseTicketRequest(request_id=request.request_id)
        assert (await workers.prefill_stub.ReleaseTicket(release)).released
        assert not (await workers.prefill_stub.ReleaseTicket(release)).released
        assert not (await workers.prefill_stub.ReleaseTicket(prefill_pb2.ReleaseTicketRequest())).released


async def test_cancel_aborts_within_a_chunk_and_fails_the_pull(model):
    async with cluster(model, prefill_options={"max_num_batched_tokens": 8}) as workers:
        gate = Gate(workers.prefill_engine)
        call = prefill(workers, workers.request(random_prompt(200, 1), greedy(5)))
        events = aiter(call)
        ticket = (await anext(events)).accepted.ticket
        async with grpc.aio.insecure_channel(workers.prefill.description.endpoint) as channel:
            stub = transfer_pb2_grpc.KvTransferServiceStub(channel)
            epoch = (await stub.Attach(transfer_pb2.AttachRequest(ticket=ticket, worker_id="d", incarnation=1))).epoch
            pull = aiter(stub.Pull(transfer_pb2.PullRequest(ticket=ticket, epoch=epoch, plane="TRANSFER_PLANE_GRPC")))
            gate.let(2)
            assert (await anext(pull)).HasField("frame")
            call.cancel()
            with pytest.raises(grpc.aio.AioRpcError, match="its prefill was cancelled") as error:
                async for _ in pull:
                    pass
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
        gate.open()
        await until(lambda: workers.prefill_engine.kv_cache.num_referenced == 0)
        assert gate.num_steps <= 4


async def until_leased(workers, num_tickets):
    """A lease starts when the last checksum is made, a moment after the first token is out."""
    await until(
        lambda: [ticket.state for ticket in workers.prefill.worker.status().tickets] == ["leased"] * num_tickets
    )


async def test_unread_kv_is_freed_when_its_lease_ends(model):
    """Case A8: a pool full of KV that nobody pulls does not block the next request for longer than the lease."""
    clock = Clock()
    options = {"num_blocks": 10}
    async with cluster(model, clock=clock, lease_seconds=30, prefill_options=options) as workers:
        tickets = []
        for seed in (1, 2):
            await workers.prefill_all(workers.request(random_prompt(20, seed), greedy(5)))
            tickets.append(workers.ticket)
        assert workers.prefill_engine.kv_cache.num_free == 0
        await until_leased(workers, 2)
        request = workers.request(random_prompt(20, 3), greedy(5))
        third = asyncio.create_task(workers.prefill_all(request, hand_off=False))
        clock.now += 29
        await asyncio.sleep(0.4)
        assert not third.done()
        clock.now += 1
        assert len((await asyncio.wait_for(third, 10)).tokens) == 1
        assert workers.value(workers.prefill, "pagewire:leases_expired_total") == 2
        async with grpc.aio.insecure_channel(workers.prefill.description.endpoint) as channel:
            stub = transfer_pb2_grpc.KvTransferServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="its lease expired"):
                await stub.Attach(transfer_pb2.AttachRequest(ticket=tickets[0]))


async def test_an_idle_worker_reaps_too(model):
    clock = Clock()
    async with cluster(model, clock=clock, lease_seconds=30) as workers:
        await workers.prefill_all(workers.request(random_prompt(9, 1), greedy(5)))
        await until_leased(workers, 1)
        clock.now += 31
        await until(lambda: len(workers.prefill.worker.leases) == 0)
        assert workers.prefill_engine.kv_cache.num_referenced == 0


async def test_the_ticket_keeps_its_blocks_from_reuse(model):
    """Case A7: later prefills that need every free block do not touch what a ticket holds."""
    prompt, params = random_prompt(20, 1), greedy(5)
    ((expected,),) = reference(model, [(prompt, params)])
    async with cluster(model, prefill_options={"num_blocks": 12}) as workers:
        request = workers.request(prompt, params)
        await workers.prefill_all(request)
        ticket = workers.ticket
        for seed in range(2, 6):
            await workers.prefill_all(workers.request(random_prompt(28, seed), params), hand_off=False)
        assert await workers.decode_all(request, ticket) == [expected[1:]]
        assert workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total") == 0


async def test_refusals_name_field_value_and_limit(model):
    async with cluster(model, prefill_options={"num_blocks": 8}) as workers:

        def send(prompt=(5, 6, 7), **fields):
            request = workers.request(prompt, greedy(4))
            request.MergeFrom(types_pb2.WorkerRequest(**fields))
            return prefill(workers, request)

        vocab = workers.prefill.description.vocab_size
        code, text = await refusal(send((5, vocab)))
        assert (code, f"prompt_token_ids[1] = {vocab}" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text
        code, text = await refusal(send(()))
        assert (code, "must not be empty" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        code, text = await refusal(send(random_prompt(33, 1)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "33" in text
        assert "32" in text
        code, text = await refusal(send(adapter={"name": "x"}))
        assert (code, "'x': this engine serves no adapters" in text) == (grpc.StatusCode.NOT_FOUND, True)
        for name, value in (("media", [{"offset": 1}]), ("pooling", True)):
            code, text = await refusal(send(**{name: value}))
            assert (code, name in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text
        code, text = await refusal(send(model="other"))
        assert (code, "'other'" in text) == (grpc.StatusCode.NOT_FOUND, True), text
        assert workers.prefill_engine.kv_cache.num_referenced == 0
        await workers.prefill_all(workers.request((5, 6, 7), greedy(4)), hand_off=False)


async def test_the_queue_is_bounded(model):
    async with cluster(model, max_queued_requests=2, prefill_options={"max_num_seqs": 1}) as workers:
        gate = Gate(workers.prefill_engine)
        calls = []
        for seed in range(3):
            call = aiter(prefill(workers, workers.request(random_prompt(9, seed), greedy(4)), hand_off=False))
            await anext(call)
            calls.append(call)
            if seed == 0:
                gate.let()
                await until(lambda: gate.num_steps or workers.prefill.worker.load().num_running)
                await until(lambda: workers.prefill.worker.load().num_waiting == 0)
        code, text = await refusal(prefill(workers, workers.request(random_prompt(9, 9), greedy(4))))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_queued_requests is 2" in text
        gate.open()
        for call in calls:
            assert [event async for event in call][-1].HasField("first_tokens")


async def test_the_load_is_what_is_to_be_computed(model):
    """Of a prompt that waits as the router expects it, of one that runs as it is: cached tokens are no load."""
    prompt = random_prompt(21, 1)
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    async with cluster(model, prefill_options=options) as workers:
        worker = workers.prefill.worker
        await workers.prefill_all(workers.request(prompt, greedy(4)), hand_off=False)
        gate = Gate(workers.prefill_engine)
        calls = []
        for seed, num_expected in ((0, 20), (2, 20), (3, 0), (4, 1 << 31)):
            asked = workers.request(prompt + random_prompt(20, seed), greedy(4), num_expected_tokens=num_expected)
            calls.append(aiter(prefill(workers, asked, hand_off=False)))
            await anext(calls[-1])
        assert worker.load().num_queued_tokens == 21 + 21 + 41 + 1
        gate.let()
        await until(lambda: worker.load().num_running == 1)
        assert worker.load().num_queued_tokens == 13 + 21 + 41 + 1, "the first one's hit and its first 8 tokens"
        gate.open()
        for call in calls:
            assert [event async for event in call][-1].first_tokens.num_cached_tokens == 20
        assert worker.load().num_queued_tokens == 0


async def test_what_has_its_blocks_waits_no_more_though_its_turn_has_not_come(model):
    """Counted as waiting too, its blocks would lack twice, and held tickets go for them."""
    async with cluster(model, prefill_options={"max_num_batched_tokens": 8}) as workers:
        worker, gate = workers.prefill.worker, Gate(workers.prefill_engine)
        asked = [workers.request(random_prompt(41, seed), greedy(4)) for seed in range(2)]
        calls = [aiter(prefill(workers, each, hand_off=False)) for each in asked]
        for call in calls:
            assert (await anext(call)).HasField("accepted")
        for num_queued_tokens in (41 - 8 + 41, 41 - 16 + 41):  # the second may have come behind the first step's plan
            gate.let()
            await until(lambda num=num_queued_tokens: worker.load().num_queued_tokens == num)
        load = worker.load()
        assert (load.num_running, load.num_waiting, len(worker._queue)) == (2, 0, 0)
        assert worker._num_lacking_blocks() == 2 - workers.prefill_engine.kv_cache.num_free
        gate.open()
        for call in calls:
            assert [event async for event in call][-1].HasField("first_tokens")


async def test_request_ids_are_unique(model):
    async with cluster(model) as workers:
        gate = Gate(workers.prefill_engine)
        request = workers.request(random_prompt(9, 1), greedy(4))
        first = aiter(prefill(workers, request, hand_off=False))
        await anext(first)
        code, _ = await refusal(prefill(workers, request))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        gate.open()
        assert [event async for event in first][-1].HasField("first_tokens")


async def test_a_step_that_fails_fails_its_request_and_its_pull(model, caplog):
    async with cluster(model) as workers:
        good = workers.prefill_engine._runner
        gate = Gate(workers.prefill_engine)
        request = workers.request(random_prompt(4 * BLOCK_SIZE, 1), greedy(4))
        call = aiter(prefill(workers, request))
        ticket = (await anext(call)).accepted.ticket
        decoding = asyncio.create_task(workers.decode_all(request, ticket))
        gate._runner = None
        gate.open()
        code, text = await refusal(call)
        assert (code, "prefill failed" in text) == (grpc.StatusCode.INTERNAL, True)
        # The id leads to the traceback and to the line that names the request.
        with_id = [record for record in caplog.records if getattr(record, "error_id", "?") in text]
        assert any(record.exc_info for record in with_id)
        assert any(getattr(record, "request_id", "") == request.request_id for record in with_id)
        workers.prefill_engine._runner = good
        assert await decoding == reference(model, [(list(request.prompt_token_ids), greedy(4))])[0]
        await workers.run(random_prompt(9, 2), greedy(3))


@pytest.mark.parametrize("task", ["lease-reaper", "manifest-writer"])
async def test_a_worker_that_lost_a_task_does_not_limp_on(model, monkeypatch, task, caplog):
    async with cluster(model) as workers:
        worker = workers.prefill.worker
        if task == "lease-reaper":
            monkeypatch.setattr(worker, "reap", lambda: 1 // 0)
        else:
            worker._manifests._queue.put_nowait(None)
        await until(lambda: workers.prefill_engine.death.done())
        assert workers.prefill_engine.death.exception() is not None
        assert f"task {task} cannot go on" in caplog.text


class RunsDry:
    """A cache that fails at its `at`-th acquire."""

    def __init__(self, cache, at):
        self._cache, self._left = cache, at

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def acquire(self, block_ids):
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("no more")
        self._cache.acquire(block_ids)


@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_collecting_is_all_or_nothing(at):
    cache = KvCache(BlockPool(16), b"r" * 32, BLOCK_SIZE)
    blocks = {name: tuple(cache.allocate(num)) for name, num in (("a", 3), ("b", 2), ("c", 2), ("gone", 1))}
    keys = (b"k" * 32,) * 3

    def progress(name, num_blocks):
        return PrefillProgress(name, num_blocks * BLOCK_SIZE, 0, blocks[name], keys[: len(blocks[name])])

    def held(name):
        return HeldKv(name, blocks[name], keys[: len(blocks[name])], len(blocks[name]) * BLOCK_SIZE, 0)

    collector = BlockCollector(cache)
    for name in "abc":
        collector.watch(name)
    collector.prepare(StepOutput(progress=[progress("c", 1)]))
    counts = [cache.ref_count(block_id) for name in blocks for block_id in blocks[name]]
    step = StepOutput(progress=[progress("a", 2), progress("b", 2), progress("c", 2)], held=[held("c"), held("gone")])
    collector._kv_cache = RunsDry(cache, at)
    if at < 4:
        with pytest.raises(RuntimeError, match="no more"):
            collector.prepare(step)
        assert [cache.ref_count(block_id) for name in blocks for block_id in blocks[name]] == counts
    collector._kv_cache = cache
    collected = {each.request_id: each.block_ids for each in collector.prepare(step)}
    assert collected == {"a": blocks["a"][:2], "b": blocks["b"], "c": blocks["c"][1:]}
    assert [cache.ref_count(block_id) for name in blocks for block_id in blocks[name]] == [2, 2, 1, 2, 2, 1, 1, 0]
