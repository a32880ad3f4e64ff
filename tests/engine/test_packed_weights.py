"""Packed weights: made once, mapped by all, remade when harmed, private when the disk is full."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.kernel_set import load_kernel_set
from engine.models.registry import load_model
from engine.weights_digest import weights_digest
from kernels import cpu
from pagewire.config import EngineOptions
from pagewire.sampling import SamplingParams
from tests.engine.model_harness import TinyModel, random_prompt

pytestmark = pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable())

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3"]
Calls = list[tuple[int, int]]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "cache"
    (tmp_path / "cache").chmod(0o755)


def logits(path: Path, cache: Path | None, dtype: str = "auto", calls: Calls | None = None) -> Tensor:
    """Of the model on native kernels, with its weights in `cache`, or in private memory."""
    run = TinyModel(path, kernels="native", dtype=dtype, max_tokens=40, num_sequences=1)
    if cache is not None:
        run.model = load_model(
            run.config,
            load_kernel_set("native"),
            cache_dir=cache,
            digest=weights_digest(path, cache_dir=cache),
            progress=None if calls is None else lambda done, total: calls.append((done, total)),
        )
    return run.logits(random_prompt(33, seed=1))


def packed_files(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "packed").iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mapped_weights_give_the_same_bits(
    tiny_model: Callable[..., Path], cache: Path, family: str, dtype: str
) -> None:
    """Stored in float32, so bfloat16 is converted on the way, to the same values as the converted copy's."""
    path = tiny_model(family, seed=1, dtype="float32")
    expected = logits(path, None, dtype)
    calls: Calls = []
    assert torch.equal(logits(path, cache, dtype, calls), expected)
    assert calls == sorted(calls)
    assert len(calls) > 5
    assert calls[-1][0] == calls[-1][1]
    (file,) = packed_files(cache)
    inode = file.stat().st_ino
    calls.clear()
    assert torch.equal(logits(path, cache, dtype, calls), expected)
    assert calls == []
    assert packed_files(cache)[0].stat().st_ino == inode
    assert not (cache / "weights").exists()


def test_each_dtype_has_its_file(tiny_model: Callable[..., Path], cache: Path) -> None:
    path = tiny_model("llama", seed=1)
    for dtype in ("float32", "bfloat16"):
        logits(path, cache, dtype)
    assert [file.name.split("-")[1] for file in packed_files(cache)] in (
        ["bfloat16", "float32"],
        ["float32", "bfloat16"],
    )


@pytest.mark.parametrize("harm", ["truncated", "flipped", "empty", "a stopped writer's"])
def test_a_harmed_file_is_made_again(
    tiny_model: Callable[..., Path], cache: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    path = tiny_model("qwen2", seed=1)
    expected = logits(path, cache)
    (file,) = packed_files(cache)
    content = file.read_bytes()
    harmed = {
        "truncated": content[: len(content) // 2],
        "flipped": content[:999] + bytes([content[999] ^ 1]) + content[1000:],
        "empty": b"",
        "a stopped writer's": content[:-64],
    }[harm]
    file.unlink()  # what is mapped above must not change
    file.write_bytes(harmed)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(path, cache), expected)
    assert "packed again" in caplog.text
    assert file.read_bytes() == content


def test_what_the_model_asks_for_must_be_in_the_file(tiny_model: Callable[..., Path], cache: Path) -> None:
    """The same tensors under another config: fewer query heads would take other sections."""
    path = tiny_model("llama", seed=1)
    expected = logits(path, cache)
    (file,) = packed_files(cache)
    other = tiny_model("qwen3", seed=1)
    logits(other, cache)
    (theirs,) = [each for each in packed_files(cache) if each != file]
    file.unlink()
    theirs.rename(file)
    assert torch.equal(logits(path, cache), expected)


def test_a_full_disk_means_private_memory(
    tiny_model: Callable[..., Path],
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_model("gemma3", seed=1)
    expected = logits(path, None)
    calls = 0

    def fail_later(*args: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*args)

    allocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", fail_later)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(path, cache), expected)
    assert "take this process's own memory: [Errno 28] No space left on device" in caplog.text
    assert packed_files(cache) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_on_native_kernels(
    tiny_model: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """From its options to tokens: weights mapped from the cache, threads as asked for, batches like single requests."""
    monkeypatch.setenv("PAGEWIRE_CACHE", str(cache))
    fields: dict[str, Any] = {"dtype": "bfloat16", "kernels": "native", "block_size": 4, "max_num_batched_tokens": 24}
    prompts = [random_prompt(length, seed=length).tolist() for length in (1, 7, 40)]
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    outputs = []
    for threads in (1, 2):
        options = EngineOptions(model=str(tiny_model(family, seed=1)), cpu_threads=threads, max_model_len=64, **fields)
        engine = Engine(options)
        assert engine.numerics_class == f"bfloat16/native/{cpu.load().isa}/tp1"
        assert cpu.load().num_threads == threads
        assert torch.get_num_threads() == 1
        outputs.append(engine.generate(prompts, params))
        outputs.append([engine.generate([prompt], params)[0] for prompt in prompts])
        engine.close()
    assert outputs[1:] == outputs[:1] * 3
    assert len(packed_files(cache)) == 1
    cpu.load().configure_threads(1)


WORKER = """
import os, sys
from pathlib import Path
import torch
from engine.kernel_set import load_kernel_set
from engine.model_config import load_model_config
from engine.models.registry import load_model
from engine.weights_digest import weights_digest

path, cache = Path(sys.argv[1]), Path(sys.argv[2])
digest = weights_digest(path, cache_dir=cache)
packs = 0
def count(done, total):
    global packs
    packs += 1
model = load_model(load_model_config(path), load_kernel_set("native"), cache_dir=cache, digest=digest, progress=count)
print("loaded", packs, flush=True)
input()
areas, area = [], None
for line in open("/proc/self/smaps"):
    fields = line.split()
    if "-" in fields[0] and not fields[0].endswith(":"):
        area = {"name": fields[-1], "inode": fields[4], "access": fields[1]}
        areas.append(area)
    else:
        area[fields[0]] = int(fields[1]) if fields[1].isdigit() else fields[1]
ours = [a for a in areas if "/packed/" in a["name"]]
assert not [a["name"] for a in areas if a["name"].endswith(".safetensors")], "the stored tensors are still mapped"
print(sorted({a["inode"] for a in ours}), {a["access"] for a in ours}, sum(a["Rss:"] for a in ours) > 0,
      *(sum(a[key] for a in ours) for key in ("Private_Dirty:", "Anonymous:")), flush=True)
input()
"""


def test_two_workers_pack_once_and_share_the_pages(tiny_model: Callable[..., Path], cache: Path) -> None:
    path = tiny_model("gemma3", seed=1, dtype="bfloat16", hidden_size=256, intermediate_size=512)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path), str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for _ in range(2)
    ]

    def lines() -> list[str]:
        return [worker.stdout.readline().strip() for worker in workers if worker.stdout]

    def go_on() -> None:
        for worker in workers:
            if worker.stdin:
                worker.stdin.write("\n")
                worker.stdin.flush()

    try:
        packs = sorted(int(line.removeprefix("loaded ")) for line in lines())
        assert packs[0] == 0
        assert packs[1] > 5
        go_on()
        (file,) = packed_files(cache)
        expected = f"['{file.stat().st_ino}'] {{'r--s'}} True 0 0"
        assert lines() == [expected] * 2
        go_on()
    finally:
        for worker in workers:
            worker.communicate(timeout=30)
    assert [worker.returncode for worker in workers] == [0, 0]
