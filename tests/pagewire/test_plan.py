"""What `pagewire up` decides before it starts anything: names, ports, and each worker's share of the machine."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pagewire.cli.plan import make_plan, with_index
from tests.engine.gguf_files import write_gguf


@pytest.fixture
def flags(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in [name for name in os.environ if name.startswith("PAGEWIRE_")]:
        monkeypatch.delenv(name)
    return {"model": str(tiny_model("llama")), "served_model_name": "tiny"}


def test_names_roles_and_ports(flags: dict[str, Any]) -> None:
    plan = make_plan({**flags, "port": "7000", "host": "0.0.0.0", "metrics_port": "9000"}, None, 2, 1)
    assert list(plan.configs) == ["prefill-0", "prefill-1", "decode-0", "router"]
    assert [role for role, _ in plan.configs.values()] == ["prefill", "prefill", "decode", "router"]
    assert [worker.worker_id for worker in plan.workers.values()] == ["prefill-0", "prefill-1", "decode-0"]
    assert [config.metrics_port for _, config in plan.configs.values()] == [9001, 9002, 9003, 9000]
    assert (plan.router.host, plan.router.port) == ("0.0.0.0", 7000)
    assert {(worker.host, worker.port) for worker in plan.workers.values()} == {("127.0.0.1", 0)}
    assert {worker.engine.served_model_name for worker in plan.workers.values()} == {"tiny"}


def test_options_reach_the_processes_that_know_them(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGEWIRE_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("PAGEWIRE_PORT", "7001")
    toml = tmp_path / "c.toml"
    toml.write_text("policy = 'load'\n[decode]\nmax_num_batched_tokens = 99\n")
    plan = make_plan({**flags, "kv_transfer": "grpc"}, toml, 1, 1)
    prefill, decode = plan.workers["prefill-0"], plan.workers["decode-0"]
    assert (prefill.kv_transfer, prefill.engine.max_num_seqs, prefill.engine.max_num_batched_tokens) == ("grpc", 5, 512)
    assert decode.engine.max_num_batched_tokens == 99
    assert (plan.router.policy, plan.router.port, prefill.port) == ("load", 7001, 0)


def test_workers_take_turns_where_each_uses_every_core(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert not make_plan(flags, None, 1, 1).take_turns
    assert not make_plan({**flags, "cpu_threads": "3"}, None, 1, 1).take_turns
    assert make_plan({**flags, "cpu_threads": "4"}, None, 1, 1).take_turns
    assert not make_plan({**flags, "cpu_threads": "4"}, None, 0, 1).take_turns
    assert not make_plan({**flags, "cpu_threads": "4", "device": "cuda"}, None, 1, 1).take_turns
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert not make_plan(flags, None, 1, 1).take_turns


def test_workers_share_threads_and_memory(flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(9)))
    plan = make_plan(flags, None, 2, 2)
    assert {worker.engine.cpu_threads for worker in plan.workers.values()} == {2}
    engines = [worker.engine for worker in plan.workers.values()]
    # By a share, so that each pool is capped to what its sequences can use, and not by a size, which is not.
    assert {(engine.kv_cache_memory_bytes, engine.kv_cache_memory_share) for engine in engines} == {(None, 0.1)}
    greedy = make_plan({**flags, "kv_cache_memory_share": "0.9"}, None, 1, 2)
    assert [worker.engine.kv_cache_memory_share for worker in greedy.workers.values()] == [pytest.approx(0.3)] * 3
    assert [worker.engine.gpu_memory_utilization for worker in greedy.workers.values()] == [pytest.approx(0.3)] * 3
    chosen = make_plan({**flags, "cpu_threads": "7", "kv_cache_memory_bytes": "1MiB"}, None, 1, 1).workers["decode-0"]
    assert (chosen.engine.cpu_threads, chosen.engine.kv_cache_memory_bytes) == (7, 1 << 20)


def test_a_gguf_file_is_expanded_to_the_workers_dtype(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    _, file = write_gguf("llama", tmp_path, num_hidden_layers=1)
    plan = make_plan({"model": str(file), "dtype": "float32"}, None, 1, 1)
    (directory,) = {plan.router.model, *(worker.engine.model for worker in plan.workers.values())}
    assert json.loads((Path(directory) / "config.json").read_text())["dtype"] == "float32"
    assert {tensor.dtype for tensor in load_file(Path(directory) / "model.safetensors").values()} == {torch.float32}
    assert plan.router.served_model_name == "model"


def test_index_is_given_to_all(flags: dict[str, Any]) -> None:
    plan = with_index(make_plan(flags, None, 1, 1), "redis://127.0.0.1:5")
    assert {config.redis_url for _, config in plan.configs.values()} == {"redis://127.0.0.1:5"}
