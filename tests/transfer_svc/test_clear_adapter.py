"""An operator clears everything that an adapter has computed: on the device and in every tier, for all tenants."""

import pytest

from engine.tiers import kv_tiers
from engine.tiers.store_tier import StoreSettings
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.worker_view_wire import label_to_proto
from tests.decode_svc.harness import BLOCK_SIZE, greedy, random_prompt, until
from tests.tiny_adapters import make_adapter
from tests.transfer_svc.fleet import fleet
from tests.transfer_svc.test_prefix_admin import ask, operator
from tests.valkey import Server

PROMPT = random_prompt(7 * BLOCK_SIZE + 2, 1)


@pytest.mark.parametrize("place", ["host", "disk", "store"])
async def test_clear_by_adapter(tiny_model, tmp_path, place, monkeypatch):
    """The model's own blocks and another adapter's stay, a name that is unloaded is cleared like any other."""
    model = tiny_model("llama")
    monkeypatch.setattr(kv_tiers, "PREFILL_PRIOR", 1.0)  # loading is never too dear
    monkeypatch.setattr(kv_tiers.KvTiers, "observe_prefill", lambda *_: None)
    paths = {
        name: make_adapter(model, tmp_path / name, seed=seed, targets=("q_proj",))
        for seed, name in enumerate(("style", "other"))
    }
    with Server() as server:
        tiers = {
            "host": {"kv_offloading_size": "1MiB"},
            "disk": {"kv_disk_path": str(tmp_path / "kv"), "kv_disk_size": "4MiB"},
            "store": {"kv_store_url": server.url, "kv_store_size": "4MiB"},
        }
        lora = {"enable_lora": True, "lora_modules": tuple(f"{name}={path}" for name, path in paths.items())}
        options = {"d0": lora, "p0": lora | {"max_loras": 2, "max_model_len": 10 * BLOCK_SIZE} | tiers[place]}
        async with fleet(model, ("p0", "d0"), options=options) as workers, operator(workers, model) as admin:
            node, own = workers["p0"], admin_pb2_grpc.AdminServiceStub(workers["p0"].channel)
            if node.engine.tiers.store is not None:
                node.engine.tiers.store.settings = StoreSettings(min_deadline=60)
            labels = {each.label.name: each.label for each in node.worker.load().adapters}

            async def prefill(name: str, salt: str) -> None:
                request = workers.request(PROMPT, greedy(1), salt=salt)
                if name:
                    request.adapter.CopyFrom(label_to_proto(labels[name]))
                await workers.prefill("p0", request)
                await until(lambda: node.engine.tiers.quiesce(0))

            async def num_computed(name: str, salt: str) -> int:
                before = node.value("computed_prompt_tokens_total")
                await prefill(name, salt)
                return int(node.value("computed_prompt_tokens_total") - before)

            for name, salt in (("style", "a"), ("style", ""), ("other", "a"), ("", "a"), ("", "")):
                assert await num_computed(name, salt) == len(PROMPT)
            pinned = ask(salt="a")
            pinned.adapter = "style"
            await admin.PinPrefix(admin_pb2.PinPrefixRequest(request=pinned, ttl_seconds=60))
            await own.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="style"))
            cleared = await admin.ClearPrefix(admin_pb2.ClearPrefixRequest(adapter_name="style"))
            assert cleared.num_blocks == 2 * 2 * 7, "of two tenants, on the device and below it"
            assert node.worker.prefixes.num_pinned_blocks == 0
            assert (await admin.ClearPrefix(admin_pb2.ClearPrefixRequest(adapter_name="style"))).num_blocks == 0
            for salt in ("a", ""):
                assert await num_computed("style", salt) == len(PROMPT), "a request that began with it"
            node.engine.kv_cache.reset()
            for name, salt in (("other", "a"), ("", "a"), ("", "")):
                assert await num_computed(name, salt) == 2
            assert (await admin.ClearPrefix(admin_pb2.ClearPrefixRequest(cache_salt="a"))).num_blocks >= 2 * 2 * 7
            assert await num_computed("", "") == 2, "another tenant's"
