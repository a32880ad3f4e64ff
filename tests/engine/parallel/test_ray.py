"""Ranks as actors of a local Ray cluster."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine.errors import EngineDied, ModelError
from engine.parallel.ray_placement import place
from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import make_engine

Tiny = Callable[..., Path]
PROMPTS = [[5, 6, 7], [(7 * i) % 290 + 5 for i in range(21)]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, seed=0)


@pytest.mark.filterwarnings("ignore")
def test_the_tokens_are_those_of_one_process_and_an_actor_that_dies_is_noticed(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra pagewire[ray])")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    model = tiny_model("llama")
    alone = make_engine(model)
    expected = alone.generate(PROMPTS, GREEDY)
    alone.close()
    engine = make_engine(model, tensor_parallel_size=2, distributed_executor_backend="ray")
    try:
        assert engine.generate(PROMPTS, GREEDY) == expected
        assert engine._ranks is not None
        (pid,) = engine._ranks._pids.values()
        assert "ray::" in " ".join(psutil.Process(pid).cmdline())
        listening = [
            each.laddr.ip.removeprefix("::ffff:")
            for process in psutil.Process().children(recursive=True)
            for each in process.net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        ]
        assert set(listening) == {"127.0.0.1"}
        assert os.environ["RAY_AUTH_MODE"] == "token"
        os.kill(pid, signal.SIGKILL)
        error = engine.death.exception(10)
        assert isinstance(error, EngineDied)
        assert f"rank 1 (process {pid}) has died" in str(error)
    finally:
        engine.close()
    assert not psutil.pid_exists(pid)


def test_without_ray_it_says_what_to_install(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModelError, match=r"needs Ray, which is not installed .*pip install pagewire\[ray\]"):
        make_engine(tiny_model("llama"), tensor_parallel_size=2, distributed_executor_backend="ray")


def test_a_cluster_of_its_own_without_authentication_is_refused(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    ray = SimpleNamespace(__version__="2.60.0", is_initialized=lambda: False, init=started.append)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ModelError, match="RAY_AUTH_MODE = disabled would let anybody"):
        make_engine(tiny_model("llama"), tensor_parallel_size=2, distributed_executor_backend="ray")
    ray.__version__ = "2.51.1"
    with pytest.raises(ModelError, match=r"needs Ray 2\.60 or newer, .*; 2\.51\.1 is installed"):
        make_engine(tiny_model("llama"), tensor_parallel_size=2, distributed_executor_backend="ray")
    assert not started


def test_a_node_that_is_started_for_a_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an autoscaler, while the placement group waits for one that is free."""
    nodes = {"own": "10.0.0.1", "busy": "10.0.0.2"}

    def wait(seconds: float) -> bool:
        nodes["new"] = "10.0.0.3"
        return True

    ray = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "own"),
        nodes=lambda: [
            {"NodeID": node, "Alive": True, "NodeManagerAddress": address, "Resources": {"CPU": 4 * (node != "own")}}
            for node, address in nodes.items()
        ],
    )
    groups = SimpleNamespace(
        placement_group=lambda bundles, strategy: SimpleNamespace(wait=wait),
        placement_group_table=lambda group: {"bundles_to_node_id": {0: "new", 1: "busy"}},
        remove_placement_group=lambda group: None,
    )
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, index: index)
    for name, module in (("placement_group", groups), ("scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, f"ray.util.{name}", module)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    placement = place(ray, 3, 1 << 20)
    assert (placement.host, placement.machines) == ("10.0.0.1", ("10.0.0.3", "10.0.0.2"))
