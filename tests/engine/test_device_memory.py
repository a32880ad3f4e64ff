"""What the pool gets of a device whose figures are known."""

import logging

import pytest

from engine.device_memory import DeviceProfile, DeviceUse, pool_budget
from engine.errors import EngineError

GIB = 1 << 30


class FakeDevice:
    """80 GiB; this process's tensors, torch's cache of them, its other memory, and what other processes take."""

    def __init__(self) -> None:
        self.tensors = self.most = self.cached = self.other = self.others = 0

    def take(self, num_bytes: int) -> None:
        self.tensors += num_bytes
        self.most = max(self.most, self.tensors)
        self.cached = max(self.cached, self.tensors)

    def uuid(self) -> str:
        return "GPU-1"

    def total(self) -> int:
        return 80 * GIB

    def free(self) -> int:
        return 80 * GIB - self.cached - self.other - self.others

    def allocated(self) -> int:
        return self.tensors

    def reserved(self) -> int:
        return self.cached

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.tensors

    def give_back(self) -> None:
        self.cached = self.tensors


def test_what_is_measured() -> None:
    device = FakeDevice()
    device.others = 5 * GIB  # there before
    profile = DeviceProfile(device)
    device.take(20 * GIB)  # loading takes more than what stays
    device.take(-4 * GIB)
    device.other = GIB

    def step() -> None:
        device.take(3 * GIB)
        device.take(-2 * GIB)
        device.take(1 * GIB)
        device.take(-2 * GIB)
        device.other += GIB // 2

    use = profile.measure(step)
    assert use == DeviceUse(
        total=80 * GIB, free=80 * GIB - 22 * GIB - GIB // 2, weights=16 * GIB, activations=3 * GIB, other=3 * GIB // 2
    )


USE = DeviceUse(total=80 * GIB, free=60 * GIB, weights=16 * GIB, activations=3 * GIB, other=GIB)


@pytest.mark.parametrize(
    ("utilization", "free", "expected"),
    [
        (0.9, 64, 72 - 16 - 3 - 1 - 2),
        (0.5, 60, 40 - 22),
        (0.275 + 1e-10, 60, 0),
        (0.9, 50, 50 - 3 - 2),  # another process has the rest
    ],
)
def test_the_pool_gets_what_is_left(utilization: float, free: int, expected: int) -> None:
    use = DeviceUse(USE.total, free * GIB, USE.weights, USE.activations, USE.other)
    budget = pool_budget(use, utilization, 2 * GIB, 512)
    assert budget.num_bytes // GIB == expected
    assert budget.source.startswith(f"gpu_memory_utilization = {utilization:g}: ")


def test_two_processes_divide_a_device(caplog: pytest.LogCaptureFixture) -> None:
    """Each counts what it has itself; what the other one has only shows in what is free."""
    first = pool_budget(DeviceUse(80 * GIB, 63 * GIB, 16 * GIB, GIB, GIB), 0.45, GIB, 512)
    assert first.num_bytes == (36 - 19) * GIB
    second = pool_budget(DeviceUse(80 * GIB, 63 * GIB - 18 * GIB - 17 * GIB, 16 * GIB, GIB, GIB), 0.45, GIB, 512)
    assert second.num_bytes == first.num_bytes
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert pool_budget(DeviceUse(80 * GIB, 9 * GIB, 16 * GIB, GIB, GIB), 0.45, GIB, 512).num_bytes == 7 * GIB
    assert "other processes leave the KV pool only 7.00 GiB" in caplog.text


def test_no_room_says_what_takes_it() -> None:
    with pytest.raises(
        EngineError,
        match=r"gpu_memory_utilization = 0\.25: 20\.00 GiB of 80\.00 GiB leaves no room for the KV pool beside weights "
        r"16\.00 GiB, activations of the largest steps \(max_num_batched_tokens = 512\) 3\.00 GiB, staging 0\.50 GiB, "
        r"other 1\.00 GiB",
    ):
        pool_budget(USE, 0.25, GIB // 2, 512)
    with pytest.raises(EngineError, match=r"but only 2\.00 GiB are free beside 16\.00 GiB of weights"):
        pool_budget(DeviceUse(80 * GIB, 2 * GIB, 16 * GIB, 3 * GIB, GIB), 0.9, GIB, 512)
