"""Ranks on other machines: the tokens of one process, whatever of the KV comes from elsewhere, and a clean end."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.errors import EngineDied
from engine.parallel import network
from engine.parallel.meeting import SharedMeeting
from engine.parallel.network import NetworkListener, connect_over_network
from engine.parallel.shared_ranks import can_share
from pagewire.sampling import SamplingParams
from tests.decode_svc.harness import make_engine
from tests.engine.parallel.distant import NAME, DistantRanks

Tiny = Callable[..., Path]
PROMPTS = [[(31 * i + 7 * j) % 290 + 5 for j in range(n)] for i, n in enumerate((3, 16, 37))]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, seed=0)
PARAMS = [GREEDY, SamplingParams(max_tokens=16, n=2, ignore_eos=True, seed=7), GREEDY]


@pytest.fixture
def distant(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From which rank on they are distant."""

    def set_first(first: int) -> None:
        monkeypatch.setattr("engine.parallel.start.ChildProcesses", partial(DistantRanks, first))

    set_first(1)
    return set_first


def tokens(model: Path, **options: Any) -> list[list[list[int]]]:
    """The second time with a prefix to hit, or, with tiers, to load."""
    engine = make_engine(model, **options)
    try:
        found = engine.generate(PROMPTS, PARAMS)
        if engine.tiers is not None:
            assert engine.tiers.quiesce()
            engine.kv_cache.reset()
        assert engine.generate(PROMPTS, PARAMS) == found
        engine.scheduler.check_integrity()
        return found
    finally:
        engine.close()


CASES = [
    pytest.param("llama", 2, 1, {"kv_offloading_size": "1MiB"}),
    pytest.param("gemma3", 4, 2, {"kv_offloading_size": "1MiB"}, marks=pytest.mark.nightly),
    pytest.param("deepseek_v3", 2, 1, {"kv_offloading_size": "1MiB"}, marks=pytest.mark.nightly),
    pytest.param("qwen3", 2, 1, {"num_blocks": 24, "max_model_len": 64}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("family", "size", "first", "options"), CASES)
@pytest.mark.usefixtures("distant")
def test_the_tokens_are_those_of_one_process(
    tiny_model: Tiny,
    distant: Callable[[int], None],
    family: str,
    size: int,
    first: int,
    options: dict[str, Any],
) -> None:
    distant(first)
    model = tiny_model(family)
    assert tokens(model, tensor_parallel_size=size, **options) == tokens(model, **options)


@pytest.mark.nightly
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.usefixtures("distant")
def test_a_quantized_cache_is_that_of_ranks_on_one_machine(
    tiny_model: Tiny, distant: Callable[[int], None], kv_dtype: str
) -> None:
    options = {"tensor_parallel_size": 2, "kv_cache_dtype": kv_dtype, "kv_offloading_size": "1MiB"}
    far = tokens(tiny_model("llama"), **options)
    distant(2)
    assert tokens(tiny_model("llama"), **options) == far


@pytest.mark.usefixtures("distant")
def test_one_that_is_killed_in_a_step_is_named_with_its_machine(tiny_model: Tiny) -> None:
    engine = make_engine(tiny_model("llama"), tensor_parallel_size=2)
    assert engine._ranks is not None
    (pid,) = engine._ranks._pids.values()
    rank = psutil.Process(pid)
    rank.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, rank.send_signal, (signal.SIGKILL,)).start()
    with pytest.raises(EngineDied, match=rf"rank 1 \(process {pid} on {NAME}\) has died: signal SIGKILL"):
        engine.generate([[5, 6, 7]], GREEDY)
    assert isinstance(engine.death.exception(5), EngineDied)
    engine.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.usefixtures("distant")
def test_a_step_that_waits_for_a_machine_that_is_gone_can_be_ended(tiny_model: Tiny) -> None:
    """Nothing says that it is gone: no socket closes."""
    engine = make_engine(tiny_model("llama"), tensor_parallel_size=2)
    assert engine._ranks is not None
    (pid,) = engine._ranks._pids.values()
    psutil.Process(pid).send_signal(signal.SIGSTOP)
    engine._ranks._processes[1].kill, kill = lambda: None, engine._ranks._processes[1].kill  # type: ignore[method-assign]
    threading.Timer(0.5, engine.give_up_step).start()
    with pytest.raises(EngineDied):
        engine.generate([[5, 6, 7]], GREEDY)
    kill()
    left: Any = engine._runner._model._group._group  # type: ignore[attr-defined]
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(left))  # nothing waits in it any more
    engine.close()


@pytest.fixture
def listener() -> Iterator[NetworkListener]:
    each = NetworkListener("127.0.0.1")
    yield each
    each.close()


def test_who_does_not_know_the_token_is_not_heard(listener: NetworkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a rank hear who listens without it; and one that says nothing holds nobody up."""
    import socket

    monkeypatch.setattr(network, "HELLO_SECONDS", 0.2)
    heard: list[Any] = []

    def accept(times: int) -> None:
        heard.extend(listener.accept(5.0) for _ in range(times))

    accepting = threading.Thread(target=accept, args=(3,))
    accepting.start()
    with socket.create_connection(listener.address):
        with pytest.raises((OSError, EOFError, network.AuthenticationError)):
            connect_over_network(listener.address, bytes(32), 1)
        monkeypatch.setattr(network, "HELLO_SECONDS", 5.0)
        right = connect_over_network(listener.address, listener.token, 3)
        accepting.join()
    assert heard[:2] == [None, None]
    assert (heard[2].rank, heard[2].pid) == (3, os.getpid())
    with right, heard[2].connection as own:
        right.sendall(b"hello")
        assert own.recv(5) == b"hello"


@pytest.mark.skipif(not can_share(), reason="no native extension")
def test_a_signal_interrupts_who_waits_for_the_others() -> None:
    """Ctrl-C while ranks don't come, e.g. in a notebook."""
    with SharedMeeting(2) as meeting:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            meeting.group()
