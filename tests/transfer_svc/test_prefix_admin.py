"""An operator looks up, pins, clears and moves prefixes, through a router and on the workers themselves."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from engine.rates import Rate
from pagewire import rpc
from pagewire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from pagewire.worker_view_wire import label_to_proto
from router.admin_service import RouterAdminServicer
from router.fleet import Fleet
from router.fleet_placer import FleetPlacer
from router.model import ModelFacts
from router.pipeline import Pipeline
from tests.decode_svc.harness import BLOCK_SIZE, greedy, random_prompt, reference, until
from tests.tiny_adapters import make_adapter
from tests.transfer_svc.fleet import fleet
from transfer_svc.client import TransferClient

PROMPT = random_prompt(7 * BLOCK_SIZE + 2, 1)
PARAMS = greedy(6)
HOST = {"kv_offloading_size": "1MiB"}
SHORT = {"max_model_len": 10 * BLOCK_SIZE}  # so that the pool of 64 blocks has room beside it


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@asynccontextmanager
async def operator(workers, model):
    """A router's AdminService over the workers."""
    names = list(workers.nodes)
    endpoints = [workers[name].app.description.endpoint for name in names]
    connected = Fleet(endpoints, silence_seconds=5.0)
    facts = ModelFacts.load(model)
    placer = FleetPlacer(connected, None, model=facts.name)
    pipeline = Pipeline(facts, placer, adapters=placer.adapters)
    server = rpc.build_server()
    servicer = RouterAdminServicer(pipeline, connected, None, on_drain=lambda: None)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    await connected.start()
    pipeline.start()
    try:
        await until(lambda: len(connected.workers()) == len(names))
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield admin_pb2_grpc.AdminServiceStub(channel)
    finally:
        await server.stop(None)
        await pipeline.close()
        await connected.stop()


def ask(prompt=PROMPT, salt=""):
    return inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=prompt), cache_salt=salt)


async def held(admin, **more):
    """Leading blocks by worker and tier."""
    answer = await admin.LookUpPrefix(admin_pb2.LookUpPrefixRequest(request=ask(**more)))
    return {each.worker_id: dict(each.num_blocks) for each in answer.workers}


async def fill(workers, name, num_prompts):
    """Other prompts pass through the pool."""
    for number in range(num_prompts):
        await workers.prefill(name, workers.request(random_prompt(8 * BLOCK_SIZE, 100 + number), greedy(1)))


async def test_look_up_says_who_has_what_where(model):
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers, operator(workers, model) as admin:
        assert await held(admin) == {"p0": {"device": 0, "host": 0}, "d0": {"device": 0}}
        await workers.prefill("p0", workers.request(PROMPT, PARAMS, salt="a"))
        await until(lambda: workers["p0"].engine.tiers.quiesce(0.1))
        assert await held(admin, salt="a") == {"p0": {"device": 7, "host": 7}, "d0": {"device": 0}}
        workers["p0"].engine.kv_cache.reset()
        assert await held(admin, prompt=PROMPT[: 3 * BLOCK_SIZE], salt="a") == {
            "p0": {"device": 0, "host": 3},
            "d0": {"device": 0},
        }
        assert await held(admin) == {"p0": {"device": 0, "host": 0}, "d0": {"device": 0}}, "another salt"


async def test_a_pinned_prefix_stays_until_it_is_let_go(model):
    async with fleet(model, ("p0",), options={"p0": SHORT}) as workers, operator(workers, model) as admin:
        node = workers["p0"]
        num_blocks, refusals = node.engine.num_blocks, []
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        pin = admin_pb2.PinPrefixRequest(request=ask(), ttl_seconds=600)
        (pinned,) = (await admin.PinPrefix(pin)).workers
        assert (pinned.worker_id, dict(pinned.num_pinned_blocks)) == ("p0", {"device": 7})
        await admin.PinPrefix(pin)  # a later one replaces it
        assert node.engine.kv_cache.num_referenced == 7
        await fill(workers, "p0", num_blocks // 8 + 3)
        assert await held(admin) == {"p0": {"device": 7}}
        longest = admin_pb2.PinPrefixRequest(request=ask(random_prompt(8 * BLOCK_SIZE, 101)), ttl_seconds=5)
        await workers.prefill("p0", workers.request(longest.request.tokens.token_ids, greedy(1)))
        for _ in range(5):  # whatever is pinned, a sequence of max_model_len fits
            longest.request.tokens.token_ids[0] += 1
            prompt = list(longest.request.tokens.token_ids)
            await workers.prefill("p0", workers.request(prompt, greedy(1)))
            try:
                await admin.PinPrefix(longest)
            except grpc.aio.AioRpcError as error:
                refusals.append((error.code(), error.details()))
        exhausted = "32 blocks are pinned, at most 32 of 64 may be: a sequence of 40 tokens must fit"
        assert set(refusals) == {(grpc.StatusCode.RESOURCE_EXHAUSTED, exhausted)}
        assert node.worker.prefixes.num_pinned_blocks <= num_blocks // 2
        await workers.prefill("p0", workers.request(random_prompt(10 * BLOCK_SIZE - 1, 55), greedy(1)))
        pin.ttl_seconds = 0
        await admin.PinPrefix(pin)
        await fill(workers, "p0", num_blocks // 8 + 6)
        assert await held(admin) != {"p0": {"device": 7}}
        await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        assert node.worker.prefixes.num_pinned_blocks == 0


async def test_a_pin_ends_by_time(model):
    async with fleet(model, ("p0",), options={"p0": SHORT}) as workers, operator(workers, model) as admin:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        await admin.PinPrefix(admin_pb2.PinPrefixRequest(request=ask(), ttl_seconds=1))
        assert workers["p0"].engine.kv_cache.num_referenced == 7
        await until(lambda: not workers["p0"].engine.kv_cache.num_referenced)


async def test_a_pin_brings_up_what_a_tier_has(model):
    async with fleet(model, ("p0",), options={"p0": HOST | SHORT}) as workers, operator(workers, model) as admin:
        node = workers["p0"]
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        assert node.engine.tiers.quiesce()
        node.engine.kv_cache.reset()
        (pinned,) = (await admin.PinPrefix(admin_pb2.PinPrefixRequest(request=ask(), ttl_seconds=60))).workers
        assert dict(pinned.num_pinned_blocks) == {"device": 7, "host": 7}
        await admin.PinPrefix(admin_pb2.PinPrefixRequest(request=ask(), ttl_seconds=0))


async def test_clear_by_prefix_and_by_tenant(model):
    """What continues the prefix goes too; others' blocks, and those before first_block, stay."""
    longer, other = [*PROMPT[: 5 * BLOCK_SIZE], *random_prompt(2 * BLOCK_SIZE, 2)], random_prompt(4 * BLOCK_SIZE, 3)
    async with fleet(model, ("p0", "d0"), options={"p0": HOST}) as workers, operator(workers, model) as admin:
        for prompt, salt in ((PROMPT, ""), (longer, ""), (other, ""), (PROMPT, "a"), (PROMPT, "b")):
            await workers.prefill("p0", workers.request(prompt, greedy(1), salt=salt))
        assert workers["p0"].engine.tiers.quiesce()
        await admin.PinPrefix(admin_pb2.PinPrefixRequest(request=ask(), ttl_seconds=60))
        cleared = await admin.ClearPrefix(admin_pb2.ClearPrefixRequest(request=ask(), first_block=4))
        assert cleared.num_blocks == 2 * (1 + 2 + 2)
        assert (await held(admin))["p0"] == (await held(admin, prompt=longer))["p0"] == {"device": 4, "host": 4}
        assert (await admin.ClearPrefix(admin_pb2.ClearPrefixRequest(cache_salt="a"))).num_blocks == 14
        assert (await held(admin, salt="a"))["p0"] == {"device": 0, "host": 0}
        assert (await held(admin, salt="b"))["p0"] == {"device": 7, "host": 7}
        assert (await held(admin, prompt=other))["p0"] == {"device": 4, "host": 4}
        assert (await admin.ClearPrefix(admin_pb2.ClearPrefixRequest(cache_salt=""))).num_blocks == 16
        for node in workers.nodes.values():
            node.engine.kv_cache.check_integrity()


async def test_move_to_another_worker(model):
    expected = reference(model, [(PROMPT, PARAMS)])[0][0]
    async with fleet(model, ("p0", "d0", "d1"), mode="off") as workers, operator(workers, model) as admin:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        move = admin_pb2.MovePrefixRequest(request=ask(), to_worker_id="d1", remove=True)
        moved = await admin.MovePrefix(move)
        assert (moved.num_blocks, moved.num_moved_blocks, moved.num_removed_blocks) == (7, 7, 7)
        assert {name: tiers["device"] for name, tiers in (await held(admin)).items()} == {"p0": 0, "d0": 0, "d1": 7}
        assert workers["d1"].value("fetched_blocks_total") == 7
        assert await workers.decode("d1", workers.request(PROMPT, PARAMS)) == expected
        assert workers["d1"].value("computed_prompt_tokens_total") == 2
        move.from_worker_id = "d0"
        with pytest.raises(grpc.aio.AioRpcError, match="nothing of the prompt is cached by 'd0'") as caught:
            await admin.MovePrefix(move)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_nothing_is_left_where_it_was_however_late_the_ticket_comes_back(model, monkeypatch):
    release = TransferClient.release

    async def late(*arguments):
        await asyncio.sleep(0.2)
        return await release(*arguments)

    monkeypatch.setattr(TransferClient, "release", late)
    async with fleet(model, ("p0", "d0"), mode="off") as workers, operator(workers, model) as admin:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        moved = await admin.MovePrefix(admin_pb2.MovePrefixRequest(request=ask(), to_worker_id="d0", remove=True))
        assert (moved.num_moved_blocks, moved.num_removed_blocks) == (7, 7)


async def test_a_move_takes_what_lies_below_the_device(model):
    """From the lender's tier, and from the tiers of the one it goes to; nothing of it is left where it was."""
    expected = reference(model, [(PROMPT, PARAMS)])[0][0]
    async with (
        fleet(model, ("p0", "d0"), mode="off", options={"p0": HOST}) as workers,
        operator(workers, model) as admin,
    ):
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        await until(lambda: workers["p0"].engine.tiers.quiesce(0) and not workers["p0"].engine.kv_cache.num_referenced)
        workers["p0"].engine.kv_cache.reset()
        moved = await admin.MovePrefix(admin_pb2.MovePrefixRequest(request=ask(), to_worker_id="d0", remove=True))
        assert (moved.num_blocks, moved.num_moved_blocks, moved.num_removed_blocks) == (7, 7, 7)
        assert await held(admin) == {"p0": {"device": 0, "host": 0}, "d0": {"device": 7}}
        assert await workers.decode("d0", workers.request(PROMPT, PARAMS)) == expected
        moved = await admin.MovePrefix(admin_pb2.MovePrefixRequest(request=ask(), to_worker_id="p0"))
        assert (moved.num_blocks, moved.num_moved_blocks, moved.num_removed_blocks) == (7, 7, 0)


async def test_a_move_fetches_whatever_it_costs(model, monkeypatch):
    """Computing is cheaper for both workers: the lender loads all the same, and the borrower waits as long as usual."""
    async with (
        fleet(model, ("p0", "d0"), options={"p0": HOST}, mode="auto") as workers,
        operator(workers, model) as admin,
    ):
        lender, fetcher = workers["p0"].engine, workers["d0"].worker.fetcher
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        await until(lambda: lender.tiers.quiesce(0) and not lender.kv_cache.num_referenced)
        lender.kv_cache.reset()
        lender.tiers.costs["host"].prefill = fetcher.rates.prefill = Rate(1e12, 1e9)
        fetcher.settings = replace(fetcher.settings, min_deadline=0.0)
        offers, best_offer = [], fetcher._best_offer

        def patient(*arguments):
            offer, declined = best_offer(*arguments)
            if offer is not None:
                offers.append(offer)
                offer = replace(offer, deadline=30.0)
            return offer, declined

        monkeypatch.setattr(fetcher, "_best_offer", patient)
        move = admin_pb2.MovePrefixRequest(request=ask(), to_worker_id="d0")
        moved = await admin.MovePrefix(move)
        (offer,) = offers
        assert offer.deadline == pytest.approx(-4 * offer.saving), "computing takes no time, so that is the fetch's"
        assert moved.num_moved_blocks == 7
        assert lender.tiers.counts()["host"][1]["declined"] == 0


async def test_a_move_leaves_what_others_need_where_it_was(model):
    """A system prompt that others continue (on the device or below), what is pinned, what is in use."""
    system = PROMPT[: 3 * BLOCK_SIZE]
    other = [*system, *random_prompt(2 * BLOCK_SIZE, 9)]
    turn = [*PROMPT[: 7 * BLOCK_SIZE], *random_prompt(2 * BLOCK_SIZE, 8)]
    move = admin_pb2.MovePrefixRequest(request=ask(), from_worker_id="p0", to_worker_id="d0", remove=True)
    pin = admin_pb2.PinPrefixRequest(request=ask(PROMPT[: 5 * BLOCK_SIZE]), worker_id="p0", ttl_seconds=60)
    async with (
        fleet(model, ("p0", "d0"), mode="off", options={"p0": HOST | SHORT}) as workers,
        operator(workers, model) as admin,
    ):
        cache, tiers = workers["p0"].engine.kv_cache, workers["p0"].engine.tiers
        for prompt in (other, turn):
            await workers.prefill("p0", workers.request(prompt, greedy(1)))
        await until(lambda: tiers.quiesce(0) and not cache.num_referenced)
        cache.reset()  # the other prompt is in the tier alone
        await workers.prefill("p0", workers.request(turn, greedy(1)))
        await admin.PinPrefix(pin)
        moved = await admin.MovePrefix(move)
        assert (moved.num_moved_blocks, moved.num_removed_blocks) == (7, 2 * (2 + 2)), "the pin and the next turn"
        assert (await held(admin))["p0"] == {"device": 5, "host": 5}
        pin.ttl_seconds = 0
        await admin.PinPrefix(pin)
        move.request.tokens.token_ids[:] = PROMPT[: 5 * BLOCK_SIZE]
        moved = await admin.MovePrefix(move)
        assert (moved.num_moved_blocks, moved.num_removed_blocks) == (0, 2 * 2), "the other prompt"
        assert (await held(admin, prompt=other))["p0"] == {"device": 3, "host": 5}
        used = cache.match(cache.keys_for(system), system)
        move.request.tokens.token_ids[:] = other
        moved = await admin.MovePrefix(move)
        assert (await held(admin, prompt=other))["p0"]["device"] == 3, "in use"
        cache.release(used)
        cache.check_integrity()
        tiers.check_integrity()


async def test_what_did_not_come_whole_is_not_removed(model, monkeypatch):
    async with fleet(model, ("p0", "d0"), mode="off") as workers, operator(workers, model) as admin:
        await workers.prefill("p0", workers.request(PROMPT, PARAMS))
        await until(lambda: not workers["p0"].engine.kv_cache.num_referenced)
        cache = workers["d0"].engine.kv_cache
        taken = cache.allocate(cache.num_free - 5)
        moved = await admin.MovePrefix(
            admin_pb2.MovePrefixRequest(request=ask(), to_worker_id="d0", from_worker_id="p0", remove=True)
        )
        assert 0 < moved.num_blocks < 7
        assert moved.num_removed_blocks == 0
        assert (await held(admin))["p0"] == {"device": 7}
        cache.release(taken)


BAD = [
    ("LookUpPrefix", admin_pb2.LookUpPrefixRequest(request=ask(), worker_id="x"), "worker 'x' is not alive"),
    ("LookUpPrefix", admin_pb2.LookUpPrefixRequest(), "prompt"),
    ("LookUpPrefix", admin_pb2.LookUpPrefixRequest(request=ask([5])), "must be at least 4, one block"),
    (
        "PinPrefix",
        admin_pb2.PinPrefixRequest(request=ask(), ttl_seconds=604801),
        "ttl_seconds = 604801: must be at",
    ),
    ("PinPrefix", admin_pb2.PinPrefixRequest(request=ask(), ttl_seconds=1), "no live worker has anything"),
    ("ClearPrefix", admin_pb2.ClearPrefixRequest(), "what: must be request, cache_salt or adapter_name"),
    ("ClearPrefix", admin_pb2.ClearPrefixRequest(adapter_name=""), "adapter_name = '': must name an adapter"),
    ("ClearPrefix", admin_pb2.ClearPrefixRequest(cache_salt="x" * 257), "cache_salt = 257: must be at most 256"),
    ("ClearPrefix", admin_pb2.ClearPrefixRequest(request=ask(), moved=True), "moved = True: must be false on a router"),
    ("MovePrefix", admin_pb2.MovePrefixRequest(request=ask()), "to_worker_id = '': must name a worker"),
    (
        "MovePrefix",
        admin_pb2.MovePrefixRequest(request=ask(), to_worker_id="p0", from_worker_id="p0"),
        "from_worker_id = 'p0': must differ",
    ),
]


async def test_bad_input_is_refused(model):
    async with fleet(model, ("p0",)) as workers, operator(workers, model) as admin:
        for method, request, message in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(admin, method)(request)
            assert message in caught.value.details()
            assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


async def test_an_adapters_prefix_is_not_the_models(model, tmp_path):
    """Looked up, pinned, moved and cleared by the adapter's name, on a router and on the workers."""
    path = make_adapter(model, tmp_path / "style", targets=("q_proj",))
    lora = {"enable_lora": True, "lora_modules": (f"style={path}",)}
    async with (
        fleet(model, ("p0", "d0"), options={"p0": lora | HOST | SHORT, "d0": lora}) as workers,
        operator(workers, model) as admin,
    ):
        request = workers.request(PROMPT, PARAMS)
        (view,) = workers["p0"].worker.load().adapters
        request.adapter.CopyFrom(label_to_proto(view.label))
        await workers.prefill("p0", request)
        await until(lambda: workers["p0"].engine.tiers.quiesce(0.1))
        by_model, by_adapter = ask(), ask()
        by_model.model = by_adapter.adapter = "style"
        nothing = {"p0": {"device": 0, "host": 0}, "d0": {"device": 0}}
        assert await held(admin) == nothing, "the model's own"

        async def holding(stub, request, name):
            answer = await stub.LookUpPrefix(admin_pb2.LookUpPrefixRequest(request=request))
            return {each.worker_id: dict(each.num_blocks) for each in answer.workers}[name]

        own = admin_pb2_grpc.AdminServiceStub(workers["p0"].channel)
        for request in (by_model, by_adapter):
            assert await holding(admin, request, "p0") == await holding(own, request, "p0") == {"device": 7, "host": 7}
        unknown = ask()
        unknown.adapter = "none"
        for stub in (admin, own):
            with pytest.raises(grpc.aio.AioRpcError, match="adapter 'none' is not"):
                await holding(stub, unknown, "p0")
        workers["p0"].engine.kv_cache.reset()
        (pinned,) = (await admin.PinPrefix(admin_pb2.PinPrefixRequest(request=by_model, ttl_seconds=60))).workers
        assert dict(pinned.num_pinned_blocks) == {"device": 7, "host": 7}, "brought up from the tier"
        moved = await admin.MovePrefix(
            admin_pb2.MovePrefixRequest(request=by_adapter, from_worker_id="p0", to_worker_id="d0", remove=True)
        )
        assert (moved.num_blocks, moved.num_moved_blocks, moved.num_removed_blocks) == (7, 7, 14)
        assert (await admin.ClearPrefix(admin_pb2.ClearPrefixRequest(request=ask()))).num_blocks == 0
        assert (await admin.ClearPrefix(admin_pb2.ClearPrefixRequest(request=by_model))).num_blocks == 7


async def test_a_worker_reads_token_ids_only(model):
    async with fleet(model, ("p0",)) as workers:
        admin = admin_pb2_grpc.AdminServiceStub(workers["p0"].channel)
        with pytest.raises(grpc.aio.AioRpcError, match="must be tokens: a worker reads no text"):
            await admin.LookUpPrefix(
                admin_pb2.LookUpPrefixRequest(request=inference_pb2.GenerateRequest(text="hello, world"))
            )
        with pytest.raises(grpc.aio.AioRpcError, match="must be empty or 'p0'"):
            await admin.PinPrefix(admin_pb2.PinPrefixRequest(request=ask(), worker_id="d0", ttl_seconds=1))
