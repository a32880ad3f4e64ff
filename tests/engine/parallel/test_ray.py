"""Ranks as actors of a local Ray cluster."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine.errors import EngineDied
from engine.model_config import ModelError
from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import make_engine
from tests.ray_cluster import two_nodes

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


@pytest.fixture(name="two_nodes")
def _two_nodes() -> Iterator[None]:
    pytest.importorskip("ray", reason="Ray is not installed (extra pagewire[ray])")
    with two_nodes():
        yield


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("two_nodes")
def test_a_rank_on_another_node_shares_no_memory_and_gives_the_same_tokens(tiny_model: Tiny) -> None:
    """With blocks that a tier has; then it is killed."""
    model = tiny_model("llama")
    alone = make_engine(model)
    expected = alone.generate(PROMPTS, GREEDY)
    alone.close()
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "kv_offloading_size": "1MiB"}
    engine = make_engine(model, **options)
    try:
        assert engine._ranks is not None
        assert engine._ranks.machines.elsewhere == [1]
        assert engine.memory.fd is None
        for _ in range(2):
            assert engine.generate(PROMPTS, GREEDY) == expected
            assert engine.tiers is not None
            assert engine.tiers.quiesce()
            engine.kv_cache.reset()
        (pid,) = engine._ranks._pids.values()
        assert "ray::" in " ".join(psutil.Process(pid).cmdline())
        os.kill(pid, signal.SIGKILL)
        assert f"rank 1 (process {pid} on " in str(engine.death.exception(10))
    finally:
        engine.close()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("two_nodes")
def test_a_cluster_with_too_few_cpus_is_refused_with_the_numbers(tiny_model: Tiny) -> None:
    with pytest.raises(ModelError, match=r"tensor_parallel_size = 4 needs 3 actors of one CPU; .* nodes have 0, 2"):
        make_engine(tiny_model("llama"), tensor_parallel_size=4, distributed_executor_backend="ray")


def test_without_ray_it_says_what_to_install(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ModelError, match=r"needs Ray, which is not installed .*pip install pagewire\[ray\]"):
        make_engine(tiny_model("llama"), tensor_parallel_size=2, distributed_executor_backend="ray")


def test_a_cluster_of_its_own_without_authentication_is_refused(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    ray = SimpleNamespace(__version__="2.60.0", is_initialized=lambda: False, init=started.append)
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ModelError, match="RAY_AUTH_MODE = disabled would let anybody"):
        make_engine(tiny_model("llama"), tensor_parallel_size=2, distributed_executor_backend="ray")
    ray.__version__ = "2.51.1"
    with pytest.raises(ModelError, match=r"needs Ray 2\.60 or newer, .*; 2\.51\.1 is installed"):
        make_engine(tiny_model("llama"), tensor_parallel_size=2, distributed_executor_backend="ray")
    assert not started
