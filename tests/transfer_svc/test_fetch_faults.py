"""Whatever happens to a fetch, the prompt is computed, its tokens are right, and nobody holds anything afterwards."""

import asyncio
import dataclasses

import pytest

import transfer_svc.lender
import transfer_svc.manifest
from pagewire.v1 import admin_pb2, admin_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.decode_svc.harness import BLOCK_SIZE, NIXL, Gate, greedy, random_prompt, reference, until
from tests.transfer_svc.fleet import fleet

PROMPT = random_prompt(7 * BLOCK_SIZE + 2, 1)
PARAMS = greedy(4)
NUM_BLOCKS = 7


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(model):
    return reference(model, [(PROMPT, PARAMS)])[0][0]


class Stop:
    """Lets the lender's checksums of the first blocks pass, then holds them until `open`."""

    def __init__(self, monkeypatch, num_blocks):
        self._left, self._go_on = num_blocks, asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        self._describe = transfer_svc.manifest.describe_blocks
        monkeypatch.setattr(transfer_svc.lender, "describe_blocks", self)
        monkeypatch.setattr(transfer_svc.lender, "MAX_BLOCKS_PER_RUN", 1)

    def __call__(self, *arguments):
        self._left -= 1
        if self._left < 0:
            self._loop.call_soon_threadsafe(self.reached.set)
            asyncio.run_coroutine_threadsafe(self._go_on.wait(), self._loop).result(60)
        return self._describe(*arguments)

    def open(self):
        self._go_on.set()


async def warm(workers, name="p0"):
    await workers.prefill(name, workers.request(PROMPT, PARAMS))


def hint(workers, *names):
    return [workers[name].source() for name in names]


async def first_token(workers, name, sources, params=PARAMS):
    return (await workers.prefill(name, workers.request(PROMPT, params, sources))).tokens[0].token_id


def failures(node, reason):
    return node.value("fetch_failures_total", reason=reason)


async def test_a_source_that_dies_in_mid_fetch(model, expected, monkeypatch):
    stop = Stop(monkeypatch, 3)
    async with fleet(model, ("p0", "p1")) as workers:
        await warm(workers)
        asked = asyncio.create_task(first_token(workers, "p1", hint(workers, "p0")))
        await until(lambda: workers["p1"].engine.kv_cache.num_cached == 3)
        await workers["p0"].app.server.server.stop(None)
        assert await asked == expected[0]
        stop.open()
        node = workers["p1"]
        assert failures(node, "peer") == 1
        assert node.value("computed_prompt_tokens_total") == len(PROMPT) - 3 * BLOCK_SIZE, "verified blocks are used"
        assert node.value("unfetched_tokens_total", reason="peer") >= 4 * BLOCK_SIZE
        assert await first_token(workers, "p1", hint(workers, "p0")) == expected[0]
        workers["p0"].worker.sender.drop_all("its borrower could not tell")


async def test_a_source_that_has_evicted_it_and_one_that_has_not(model, expected):
    async with fleet(model, ("p0", "p1", "d0")) as workers:
        await warm(workers)
        await workers.decode("d0", workers.request(PROMPT, PARAMS))
        await workers["p0"].worker.reset_prefix_cache()
        assert await first_token(workers, "p1", hint(workers, "p0", "d0")) == expected[0]
        node = workers["p1"]
        assert failures(node, "gone") <= 1, "the stale hint may be tried first"
        assert node.value("fetched_tokens_total", source="remote_decode") == NUM_BLOCKS * BLOCK_SIZE
        assert node.value("unfetched_tokens_total", reason="gone") == 0


async def test_a_source_that_has_restarted_or_never_was(model, expected):
    async with fleet(model, ("p0", "p1")) as workers:
        await warm(workers)
        old = workers["p0"].source(incarnation=workers["p0"].app.description.incarnation + 2)
        nobody = workers["p0"].source(worker_id="ghost", endpoint="127.0.0.1:1")
        assert await first_token(workers, "p1", [old, nobody]) == expected[0]
        node = workers["p1"]
        assert failures(node, "peer") == 2
        assert node.value("computed_prompt_tokens_total") == len(PROMPT)
        other = random_prompt(len(PROMPT), 9)
        await workers.prefill("p1", workers.request(other, PARAMS, [old, nobody]))
        assert failures(node, "peer") == 2, "they are left alone for a while"


@pytest.mark.parametrize("plane", ["grpc", "tcp", "shm_vm", NIXL])
@pytest.mark.parametrize("num_bad", [1, 100])
async def test_a_block_that_arrives_corrupted(model, expected, monkeypatch, plane, num_bad):
    checksum, left = transfer_svc.manifest.checksum, [num_bad]

    def wrong(data):
        left[0] -= 1
        return checksum(data) ^ (left[0] >= 0)

    monkeypatch.setattr(transfer_svc.manifest, "checksum", wrong)
    async with fleet(model, ("p0", "p1"), plane=plane) as workers:
        await warm(workers)
        assert await first_token(workers, "p1", hint(workers, "p0")) == expected[0]
        assert failures(workers["p1"], "block") == 3
        assert workers["p1"].value("computed_prompt_tokens_total") == len(PROMPT)


async def test_a_source_with_other_tokens_under_the_key(model, expected, monkeypatch):
    """Its answer would be taken for a hit if only the index's half of the key were compared."""
    async with fleet(model, ("p0", "p1")) as workers:
        await warm(workers)
        pool = workers["p0"].engine.kv_cache._pool
        monkeypatch.setattr(pool, "_token_ids", [(9,) * BLOCK_SIZE if ids else () for ids in pool._token_ids])
        assert await first_token(workers, "p1", hint(workers, "p0")) == expected[0]
        assert failures(workers["p1"], "gone") == 1
        assert workers["p1"].value("fetched_blocks_total") == 0


async def test_a_slow_source_is_not_waited_for(model, expected, monkeypatch):
    stop = Stop(monkeypatch, 2)
    async with fleet(model, ("p0", "p1"), min_deadline=0.5) as workers:
        await warm(workers)
        assert await first_token(workers, "p1", hint(workers, "p0")) == expected[0]
        node = workers["p1"]
        assert failures(node, "deadline") == 1
        assert node.value("computed_prompt_tokens_total") >= len(PROMPT) - 2 * BLOCK_SIZE
        stop.open()


async def test_other_requests_go_on_meanwhile(model, expected, monkeypatch):
    stop = Stop(monkeypatch, 2)
    async with fleet(model, ("p0", "p1")) as workers:
        await warm(workers)
        asked = asyncio.create_task(first_token(workers, "p1", hint(workers, "p0")))
        await stop.reached.wait()
        other = random_prompt(20, 2)
        ((first, *_),) = reference(model, [(other, greedy(1))])[0]
        assert (await workers.prefill("p1", workers.request(other, PARAMS))).tokens[0].token_id == first
        assert not asked.done()
        stop.open()
        assert await asked == expected[0]


async def test_a_cancelled_request_ends_its_fetch(model, monkeypatch):
    stop = Stop(monkeypatch, 2)
    async with fleet(model, ("p0", "p1", "d0")) as workers:
        await warm(workers)
        sources = hint(workers, "p0")
        stub = prefill_pb2_grpc.PrefillServiceStub(workers["p1"].channel)
        call = stub.Prefill(prefill_pb2.PrefillRequest(request=workers.request(PROMPT, PARAMS, sources)))
        await call.read()
        decoding = asyncio.create_task(workers.decode("d0", workers.request(PROMPT, PARAMS, sources)))
        await until(lambda: len(workers["p0"].worker.leases) == 2)
        await until(
            lambda: workers["p1"].engine.kv_cache.num_referenced or workers["d0"].engine.kv_cache.num_referenced
        )
        call.cancel()
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
        for name in ("p1", "d0"):
            await until(lambda name=name: not workers[name].worker.has_work)
        await until(lambda: not len(workers["p0"].worker.leases))
        stop.open()


async def test_equal_prompts_in_a_burst_are_fetched_once(model, expected):
    async with fleet(model, ("p0", "p1")) as workers:
        await warm(workers)
        burst = [first_token(workers, "p1", hint(workers, "p0")) for _ in range(5)]
        assert await asyncio.gather(*burst) == [expected[0]] * 5
        assert workers["p1"].value("fetched_blocks_total") == NUM_BLOCKS


async def test_a_lender_in_need_takes_its_blocks_back(model, expected, monkeypatch):
    """16 blocks, 8 cached and lent; then a prompt comes that needs 12."""
    stop = Stop(monkeypatch, 2)
    async with fleet(model, ("p0", "p1"), options={"p0": {"num_blocks": 16}}) as workers:
        await warm(workers)
        asked = asyncio.create_task(first_token(workers, "p1", hint(workers, "p0")))
        await stop.reached.wait()
        status = await admin_pb2_grpc.AdminServiceStub(workers["p0"].channel).GetStatus(admin_pb2.GetStatusRequest())
        (ticket,) = status.workers[0].tickets
        assert (ticket.state, ticket.num_blocks) == ("lent", NUM_BLOCKS)
        large = random_prompt(12 * BLOCK_SIZE, 3)
        ((first, *_),) = reference(model, [(large, greedy(1))])[0]
        assert (await workers.prefill("p0", workers.request(large, PARAMS))).tokens[0].token_id == first
        assert workers["p0"].value("lends_revoked_total") == 1
        stop.open()
        assert await asked == expected[0]
        assert failures(workers["p1"], "gone") == 1


async def test_what_is_lent_is_bounded(model, expected):
    async with fleet(model, ("p0", "p1")) as workers:
        await warm(workers)
        lender = workers["p0"].worker.lender
        lender._limits = dataclasses.replace(lender._limits, max_share=3 / 64)
        assert await first_token(workers, "p1", hint(workers, "p0")) == expected[0]
        assert workers["p1"].value("fetched_blocks_total") == 3
        assert workers["p1"].value("unfetched_tokens_total", reason="partial") == 4 * BLOCK_SIZE
        await workers["p1"].worker.reset_prefix_cache()
        lender._limits = dataclasses.replace(lender._limits, max_tickets=0)
        assert await first_token(workers, "p1", hint(workers, "p0")) == expected[0]
        assert workers["p0"].value("lends_refused_total") >= 1


async def test_a_full_pool_is_left_to_its_own_requests(model, expected):
    async with fleet(model, ("p0", "p1"), options={"p1": {"num_blocks": 9}}) as workers:
        await warm(workers)
        held = workers["p1"].engine.kv_cache.allocate(8)
        asked = asyncio.create_task(first_token(workers, "p1", hint(workers, "p0")))
        await until(lambda: workers["p1"].value("fetches_declined_total", reason="pool"))
        workers["p1"].engine.kv_cache.release(held)
        assert await asked == expected[0]


async def test_computing_can_be_cheaper(model, expected):
    async with fleet(model, ("p0", "p1"), mode="auto") as workers:
        await warm(workers)
        fetcher = workers["p1"].worker.fetcher
        fetcher.rates.prefill.observe(1e12, 1.0)
        assert await first_token(workers, "p1", hint(workers, "p0")) == expected[0]
        node = workers["p1"]
        assert node.value("fetches_declined_total", reason="dearer") == 1
        assert node.value("unfetched_tokens_total", reason="dearer") == NUM_BLOCKS * BLOCK_SIZE
        assert node.value("fetched_blocks_total") == 0


async def test_off_means_off(model, expected):
    async with fleet(model, ("p0", "p1"), mode="off") as workers:
        await warm(workers)
        assert await first_token(workers, "p1", hint(workers, "p0")) == expected[0]
        assert workers["p1"].value("computed_prompt_tokens_total") == len(PROMPT)
        assert workers["p1"].value("unfetched_tokens_total", reason="off") == NUM_BLOCKS * BLOCK_SIZE


async def test_without_caching_it_is_off_and_not_short(model, expected):
    async with fleet(model, ("p0", "p1"), options={"p1": {"enable_prefix_caching": False}}) as workers:
        await warm(workers)
        assert await first_token(workers, "p1", hint(workers, "p0")) == expected[0]
        assert workers["p1"].value("unfetched_tokens_total", reason="off") == NUM_BLOCKS * BLOCK_SIZE


async def test_what_is_too_short_to_be_fetched_is_counted(model, expected):
    """Once: what is here afterwards is not computed again."""
    async with fleet(model, ("p0", "p1", "d0"), min_tokens=NUM_BLOCKS * BLOCK_SIZE + 1) as workers:
        await warm(workers)
        for _ in range(2):
            assert await first_token(workers, "p1", hint(workers, "p0")) == expected[0]
            assert await workers.decode("d0", workers.request(PROMPT, PARAMS, hint(workers, "p0"))) == expected
            for name in ("p1", "d0"):
                assert workers[name].value("unfetched_tokens_total", reason="short") == NUM_BLOCKS * BLOCK_SIZE
                assert workers[name].value("fetched_blocks_total") == 0


async def test_decode_fetches_what_a_lost_prefill_worker_does_not_bring(model, expected):
    async with fleet(model, ("p0", "p1", "d0")) as workers:
        await warm(workers, "p1")
        gate = Gate(workers["p0"].engine)
        request = workers.request(PROMPT, PARAMS, hint(workers, "p1"))
        stub = prefill_pb2_grpc.PrefillServiceStub(workers["p0"].channel)
        alone = workers.request(PROMPT, PARAMS)
        call = stub.Prefill(prefill_pb2.PrefillRequest(request=alone, hand_off=True))
        ticket = (await call.read()).accepted.ticket
        decoding = asyncio.create_task(workers.decode("d0", request, workers.ticket_of("p0", ticket)))
        await until(lambda: workers["d0"].worker.load().num_transfers == 1)
        await until(lambda: workers["p0"].worker.leases.tickets[0].epoch == 1)
        await workers["p0"].app.server.server.stop(None)
        assert await decoding == expected
        node = workers["d0"]
        assert node.value("fetched_tokens_total", source="remote_prefill") == NUM_BLOCKS * BLOCK_SIZE
        assert node.value("prefill_tokens_on_decode_total") == 2
        gate.open()
