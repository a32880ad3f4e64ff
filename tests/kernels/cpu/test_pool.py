"""The thread pool: idle it uses no CPU, callers don't meet, a forked child gets a pool of its own."""

import os
import threading
import time

import pytest
import torch

import kernels.cpu
from kernels.cpu.native import NativeKernels
from tests.kernels.cpu.harness import assert_same_bits, kernels_for, normal


@pytest.fixture(params=["avx2", "avx512_bf16"])
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return kernels_for(request.param)


def test_idle_threads_use_no_cpu(native: NativeKernels) -> None:
    kernels.cpu.load().configure_threads(3, spin_microseconds=200)
    weight, x = native.pack(normal(512, 512, dtype=torch.float32, seed=1)), normal(4, 512, dtype=torch.float32, seed=2)
    native.linear(x, weight)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
    kernels.cpu.load().configure_threads(1)


def test_threads_end_with_the_pool(native: NativeKernels) -> None:
    extension = kernels.cpu.load()
    weight, x = native.pack(normal(512, 512, dtype=torch.float32, seed=1)), normal(4, 512, dtype=torch.float32, seed=2)

    def has_threads(num_threads: int) -> None:
        """The system lists a thread for a moment after it was joined."""
        deadline = time.monotonic() + 60
        while len(os.listdir("/proc/self/task")) != num_threads:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    extension.configure_threads(1)
    before = len(os.listdir("/proc/self/task"))
    for num_threads in (4, 2, 3):
        extension.configure_threads(num_threads)
        assert extension.num_threads == num_threads
        native.linear(x, weight)
        has_threads(before + num_threads - 1)
    extension.configure_threads(1)
    has_threads(before)


def test_threads_can_be_pinned(native: NativeKernels) -> None:
    extension = kernels.cpu.load()
    cpu = max(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    mine = os.sched_getaffinity(0)
    extension.configure_threads(2, [cpu, cpu])
    weight = native.pack(normal(512, 512, dtype=torch.float32, seed=1))
    for _ in range(3):
        native.linear(normal(4, 512, dtype=torch.float32, seed=2), weight)
    (worker,) = set(os.listdir("/proc/self/task")) - before
    assert os.sched_getaffinity(int(worker)) == {cpu}
    assert os.sched_getaffinity(0) == mine
    extension.configure_threads(1)


def test_a_pool_needs_a_thread() -> None:
    kernels_for("avx2")
    with pytest.raises(ValueError, match="at least 1"):
        kernels.cpu.load().configure_threads(0)


def test_several_callers_at_once(native: NativeKernels) -> None:
    kernels.cpu.load().configure_threads(2, spin_microseconds=0)
    weight = native.pack(normal(300, 400, dtype=torch.bfloat16, seed=1))
    inputs = [normal(20, 400, dtype=torch.bfloat16, seed=s) for s in range(4)]
    expected = [native.linear(x, weight) for x in inputs]
    failures: list[BaseException] = []

    def call(index: int) -> None:
        try:
            for _ in range(100):
                assert_same_bits(native.linear(inputs[index], weight), expected[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    kernels.cpu.load().configure_threads(1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_computes_too(native: NativeKernels) -> None:
    kernels.cpu.load().configure_threads(2)
    weight, x = native.pack(normal(512, 512, dtype=torch.float32, seed=1)), normal(40, 512, dtype=torch.float32, seed=2)
    expected = native.linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(native.linear(x, weight), expected) else 1)
    deadline = time.monotonic() + 60
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert status == 0
    assert_same_bits(native.linear(x, weight), expected)
    kernels.cpu.load().configure_threads(1)
