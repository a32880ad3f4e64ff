"""The profiling run on the real model, in the interpreter, with a device whose figures are made up."""

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import build, decode_graphs, device_staging
from engine.cache_dir import default_cache_dir
from engine.device_sampler import DeviceSampler
from engine.engine import Engine
from engine.errors import EngineError
from engine.largest_steps import StepLimits, _shapes
from engine.models.decoder import Decoder
from pagewire.config import EngineOptions
from tests.engine.test_device_memory import FakeDevice
from tests.tiny_models import VOCAB_SIZE

MIB = 1 << 20


def is_free_to_start(uuid: str) -> bool:
    with (default_cache_dir() / "gpus" / f"{uuid}.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


class Profiled(FakeDevice):
    """80 MiB. `sampled` sees the rows that were drawn."""

    def total(self) -> int:
        return 80 * MIB

    def free(self) -> int:
        assert not is_free_to_start(self.uuid())
        return 80 * MIB - self.cached - self.other - self.others


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Profiled:
    monkeypatch.setenv("PAGEWIRE_CACHE", str(tmp_path / "cache"))
    made = Profiled()
    monkeypatch.setattr(build, "open_device_memory", lambda _: made)
    monkeypatch.setattr(device_staging, "LANE_BYTES", 1)
    return made


def options(path: Path, **changes: object) -> EngineOptions:
    fields = {"model": str(path), "block_size": 4, "kernels": "triton", "cpu_threads": 1, "max_model_len": 24}
    return EngineOptions.model_validate({**fields, "max_num_batched_tokens": 12, "max_num_seqs": 3, **changes})


def test_the_pool_gets_what_the_largest_steps_leave(
    tiny_model: Callable[..., Path], device: Profiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, drawn = [], []
    forward, logits = Decoder.forward, Decoder.logits

    def watched(self: Decoder, ids: torch.Tensor, positions: torch.Tensor, batch: object, *rest: object) -> object:
        sequences = [each for each in (batch.short, batch.long) if each is not None]  # type: ignore[attr-defined]
        steps.append((len(ids), max(each.max_kv_len for each in sequences)))
        device.take(5 * MIB)
        result = forward(self, ids, positions, batch, *rest)  # type: ignore[arg-type]
        device.take(-5 * MIB)
        return result

    def counted(self: Decoder, hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        result = logits(self, hidden, *rest)  # type: ignore[arg-type]
        drawn.append(tuple(result.shape))
        return result

    monkeypatch.setattr(Decoder, "forward", watched)
    monkeypatch.setattr(Decoder, "logits", counted)
    path = tiny_model("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    engine = Engine(options(path, gpu_memory_utilization=0.5, enforce_eager=True))
    assert steps == [(12, 12), (3, 24)]
    assert drawn == [(3, VOCAB_SIZE)] * 2
    size = engine.memory.io.block_bytes
    assert is_free_to_start(device.uuid())
    assert engine.num_blocks == (40 * MIB - 5 * MIB - 8 * size) // size
    engine.close()
    monkeypatch.setattr(decode_graphs, "GRAPH_BYTES", MIB)
    engine = Engine(options(path, gpu_memory_utilization=0.5))
    assert steps[2:] == [(12, 12), (3, 24), (3, 24)]  # the last one is what the graphs share, of 1, 2 and 3 sequences
    logits = 4 * VOCAB_SIZE * (1 + 2)
    assert engine.num_blocks == (40 * MIB - 5 * MIB - 5 * MIB - 3 * MIB - logits - 8 * size) // size
    engine.close()


def test_no_room_and_an_own_size(tiny_model: Callable[..., Path], device: Profiled) -> None:
    path = tiny_model("llama", num_hidden_layers=1)
    device.take(30 * MIB)
    with pytest.raises(EngineError, match=r"gpu_memory_utilization = 0\.25: .* leaves no room for the KV pool"):
        build.build_parts(options(path, gpu_memory_utilization=0.25))
    parts = build.build_parts(options(path, gpu_memory_utilization=0.25, kv_cache_memory_bytes=1 << 16))
    assert parts.memory.num_blocks == (1 << 16) // parts.memory.io.block_bytes
    parts.memory.close()


@pytest.mark.nightly
def test_drafts_have_logits(tiny_model: Callable[..., Path], device: Profiled, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    sample = DeviceSampler.sample

    def counted(self: DeviceSampler, logits: torch.Tensor, rows: list[Any]) -> list[Any]:
        drawn.append((len(logits), len(rows)))
        return sample(self, logits, rows)

    monkeypatch.setattr(DeviceSampler, "sample", counted)
    drafts = '{"method": "ngram", "num_speculative_tokens": 2}'
    parts = build.build_parts(options(tiny_model("llama"), speculative_config=drafts))
    assert drawn == [(9, 9)] * 2
    parts.memory.close()


def test_the_largest_steps_reach_every_limit() -> None:
    assert _shapes(StepLimits(100, 8, 64)) == [([64, 36], [64, 36]), ([1] * 8, [64] * 8)]
    assert _shapes(StepLimits(100, 64, 4096, num_drafts=3)) == [([100], [100]), ([4] * 25, [4096] * 25)]
    assert _shapes(StepLimits(4, 8, 64)) == [([4], [4]), ([1] * 4, [64] * 4)]
