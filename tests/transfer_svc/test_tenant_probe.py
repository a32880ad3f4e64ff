"""A tenant who asks what another one has asked before learns nothing: not by what is reported, not by what it costs.

Times differ on any machine, work doesn't: what a probe makes the workers do is compared, count by count, with what a
prompt that nobody has ever asked makes them do.
"""

from collections import Counter

import pytest

from pagewire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from tests.decode_svc.harness import BLOCK_SIZE, greedy, random_prompt, until
from tests.transfer_svc.fleet import Fleet, fleet

PARAMS = greedy(3)
COUNTED = (
    "computed_prompt_tokens_total",
    "fetched_blocks_total",
    "lent_blocks_total",
    "transfer_blocks_total",
    "transfer_bytes_total",
    "prefill_tokens_on_decode_total",
)
SOURCES = ("local_device", "local_host", "remote_prefill", "remote_decode")


def prompt(number: int) -> list[int]:
    return random_prompt(7 * BLOCK_SIZE + 2, number)


def counts(workers: Fleet) -> Counter[str]:
    """What all workers have done so far."""
    found = Counter[str]()
    for node in workers.nodes.values():
        found.update({name: int(node.value(name)) for name in COUNTED})
        found.update({each: int(node.value("hit_tokens_total", source=each)) for each in SOURCES})
    return found


async def quiet(workers: Fleet) -> None:
    for node in workers.nodes.values():
        await until(lambda node=node: not node.engine.kv_cache.num_referenced and node.engine.tiers.quiesce(0))


async def work_of(workers: Fleet, tokens: list[int], salt: str) -> tuple[Counter[str], list[int]]:
    """What a request through P and D makes the workers do, and its answer. Hints are as long as a router could give."""
    before = counts(workers)
    hint = [workers[name].source(7) for name in ("p0", "d0")]
    request = workers.request(tokens, PARAMS, hint, salt=salt)
    await workers.prefill("p1", request)
    answer = await workers.decode("d1", workers.request(tokens, PARAMS, hint, salt=salt))
    await quiet(workers)
    return counts(workers) - before, answer


@pytest.mark.parametrize("where", ["the worker itself", "another worker", "host memory alone"])
async def test_a_probe_costs_what_an_unknown_prompt_costs(tiny_model, where):
    """CASES C10, D5: on the device, in a tier and on other workers; with the owner's own request as the contrast."""
    names = ("p0", "p1", "d0", "d1")
    options = {name: {"kv_offloading_size": "1MiB"} for name in names}
    async with fleet(tiny_model("llama"), names, options=options) as workers:
        for name in ("p0", "d0") if where == "another worker" else ("p1", "d1"):
            ask = workers.prefill if name.startswith("p") else workers.decode
            await ask(name, workers.request(prompt(1), PARAMS, salt="owner"))
        await quiet(workers)
        if where == "host memory alone":
            for node in workers.nodes.values():
                node.engine.kv_cache.reset()
        unknown, _ = await work_of(workers, prompt(2), "probe")
        probe, answer = await work_of(workers, prompt(1), "probe")
        assert probe == unknown
        assert not any(probe[each] for each in SOURCES)
        owner, expected = await work_of(workers, prompt(1), "owner")
        assert answer == expected
        assert owner["computed_prompt_tokens_total"] < probe["computed_prompt_tokens_total"], "else it proves nothing"


async def test_an_operator_finds_a_prompt_under_its_own_salt_alone(tiny_model):
    async with fleet(tiny_model("llama"), ("p0",)) as workers:
        await workers.prefill("p0", workers.request(prompt(1), PARAMS, salt="owner"))
        admin = admin_pb2_grpc.AdminServiceStub(workers["p0"].channel)
        for salt, expected in (("owner", 7), ("probe", 0), ("", 0)):
            tokens = inference_pb2.TokenPrompt(token_ids=prompt(1))
            request = inference_pb2.GenerateRequest(tokens=tokens, cache_salt=salt)
            answer = await admin.LookUpPrefix(admin_pb2.LookUpPrefixRequest(request=request))
            assert answer.workers[0].num_blocks["device"] == expected
