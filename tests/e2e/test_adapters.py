"""Adapters in a running system: loaded, listed, asked for by name on every door, refused with a reason, unloaded."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire import Client
from pagewire.errors import PagewireError
from pagewire.sampling import SamplingParams
from pagewire.v1 import admin_pb2 as pb
from pagewire.v1 import admin_pb2_grpc
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.decode_svc.harness import make_engine
from tests.e2e.cluster import Cluster
from tests.ports import free_port
from tests.tiny_adapters import make_adapter, merge

PROMPT = [(7 * i) % 250 + 10 for i in range(41)]
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def running(
    zygote: Zygote, tiny_model: Callable[..., Path], valkey_url: str, tmp_path: Path
) -> Iterator[tuple[Cluster, int]]:
    model = tiny_model("llama")
    for seed, name in enumerate(("one", "two")):
        make_adapter(model, tmp_path / "root" / name, seed=seed)
    make_adapter(model, tmp_path / "root" / "wide", rank=32)
    port = free_port()
    flags = ("--kv-cache-memory-bytes", "2MiB", "--max-model-len", "256", "--enable-lora",
             "--lora-root", str(tmp_path / "root"), "--lora-modules", f"one={tmp_path / 'root' / 'one'}")  # fmt: skip
    http = ("--http-port", str(port))
    with System.forked(zygote, model, tmp_path, *flags, redis_url=valkey_url, router=http) as cluster:
        yield cluster, port
        cluster.wait_quiet()
        cluster.stop()


def post(port: int, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "return_token_ids": True, **GREEDY}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_a_life_of_adapters(running: tuple[Cluster, int], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    cluster, port = running
    expected = {}
    for name in ("tiny", "one", "two"):
        path = tiny_model("llama")
        path = path if name == "tiny" else merge(path, tmp_path / "root" / name, tmp_path / f"merged-{name}")
        engine = make_engine(path)
        expected[name] = engine.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))[0][
            0
        ]
        engine.close()
    with grpc.insecure_channel(cluster.target) as channel, cluster.client() as client:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        _check_loading(admin, client)
        for name, tokens in expected.items():
            for cached in (0, 40):
                done = client.complete(PROMPT, model=name, **GREEDY)
                assert (list(done.token_ids), done.usage.cached_tokens) == (tokens, cached), name
            answer = post(port, name)
            assert (answer["model"], answer["choices"][0]["token_ids"]) == (name, tokens)
        _check_http_names(port)
        first = {
            each.adapter.ref.generation for each in admin.ListAdapters(pb.ListAdaptersRequest(), timeout=10).adapters
        }
        assert len(first) == 2, "each load has a number, the same on both workers"
        admin.LoadAdapter(pb.LoadAdapterRequest(name="two", path="two"), timeout=60)
        assert {model.name for model in client.list_models()} == {"tiny", "one", "two"}
        again = client.complete(PROMPT, model="two", **GREEDY)
        assert (list(again.token_ids), again.usage.cached_tokens) == (expected["two"], 0), "another load's KV"
        assert admin.UnloadAdapter(pb.UnloadAdapterRequest(name="one"), timeout=10).num_workers == 2
        assert {model.name for model in client.list_models()} == {"tiny", "two"}
        with pytest.raises(PagewireError, match="'one' is not served here; known models: 'tiny', 'two'"):
            client.complete(PROMPT, model="one", **GREEDY)
        assert list(client.complete(PROMPT, **GREEDY).token_ids) == expected["tiny"]


def _check_loading(admin: Any, client: Client) -> None:
    for path, reason in (
        ("../../etc", "leads outside"),
        ("nowhere", "is no directory"),
        ("wide", r"has rank 32, the limit \(max_lora_rank\) is 16"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            admin.LoadAdapter(pb.LoadAdapterRequest(name="bad", path=path), timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(reason, refused.value.details())
    assert {each.adapter.ref.name for each in admin.ListAdapters(pb.ListAdaptersRequest(), timeout=10).adapters} == {
        "one"
    }
    loaded = admin.LoadAdapter(pb.LoadAdapterRequest(name="two", path="two"), timeout=60).adapter
    assert (loaded.ref.name, loaded.rank, len(loaded.ref.digest)) == ("two", 4, 32)
    assert {model.name for model in client.list_models()} == {"tiny", "one", "two"}


def _check_http_names(port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
        found = {each["id"]: each["parent"] for each in json.load(answer)["data"]}
    assert found == {"tiny": None, "one": "tiny", "two": "tiny"}
    with pytest.raises(urllib.error.HTTPError) as unknown:
        post(port, "three")
    assert unknown.value.code == 404
    unknown.value.close()
