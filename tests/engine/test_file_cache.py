"""The bounded directory of mapped files: what is used stays, the longest unused goes first, readers never notice."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.file_cache import exclusive, mark_used, prune
from engine.kernel_set import load_kernel_set
from engine.models.registry import load_model
from engine.section_file import SectionFile, SectionWriter
from engine.weights_digest import weights_digest
from kernels import cpu
from tests.engine.model_harness import TinyModel, random_prompt


def make(directory: Path, name: str, age: int) -> Path:
    file = directory / name
    with SectionWriter(file) as writer:
        with writer.section("s", 4096) as data:
            data.fill_(age)
        writer.finish()
    os.utime(file, ns=(10**18 - age, 10**18 - age))
    return file


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    files = {name: make(tmp_path, name, age) for name, age in (("old", 3), ("middle", 2), ("new", 1))}
    (tmp_path / "old.lock").touch()
    size = files["old"].stat().st_size
    prune(tmp_path, 3 * size)
    assert names(tmp_path) == {"old", "middle", "new", "old.lock"}
    mark_used(files["old"])
    prune(tmp_path, 3 * size - 1)
    assert names(tmp_path) == {"old", "new", "old.lock"}
    prune(tmp_path, 0)
    assert names(tmp_path) == {"old.lock"}


def test_what_is_mapped_stays_until_the_last_tensor_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "used", 2)
    make(tmp_path, "other", 1)
    tensor = SectionFile(tmp_path / "used").tensor("s", 4096)
    prune(tmp_path, 0)
    assert names(tmp_path) == {"used"}
    assert "all of it is in use" in caplog.text
    assert tensor[7] == 2
    del tensor
    prune(tmp_path, 0)
    assert names(tmp_path) == set()


def test_another_processs_use_ends_with_it(tmp_path: Path) -> None:
    make(tmp_path, "used", 1)
    code = "import sys, pathlib; from engine.section_file import SectionFile\n"
    code += "kept = SectionFile(pathlib.Path(sys.argv[1])).tensor('s', 4096); print('mapped', flush=True); input()"
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "used")],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "mapped\n"
        prune(tmp_path, 0)
        assert names(tmp_path) == {"used"}
    finally:
        reader.kill()
        reader.communicate(timeout=30)
    prune(tmp_path, 0)
    assert names(tmp_path) == set()


def test_a_reader_that_comes_too_late_for_the_name_has_the_bytes(tmp_path: Path) -> None:
    """Opened, not locked yet, deleted meanwhile."""
    file = make(tmp_path, "f", 5)
    with file.open("rb") as stream:
        prune(tmp_path, 0)
        assert names(tmp_path) == set()
        assert SectionFile(Path(f"/proc/self/fd/{stream.fileno()}")).tensor("s", 4096)[0] == 5


def test_leftovers_of_dead_makers_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    for name in ("dead", "live"):
        (tmp_path / f"{name}.partial").write_bytes(b"x" * 100)
        (tmp_path / f"{name}.lock").touch()
    with exclusive(tmp_path / "live.lock"):
        prune(tmp_path, 1 << 30)
    assert names(tmp_path) == {"dead.lock", "live.partial", "live.lock"}


@pytest.mark.skipif(not cpu.available(), reason=cpu.why_unavailable())
def test_packing_another_model_deletes_the_unused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    first, second = tiny_model("llama", seed=1), tiny_model("qwen2", seed=1)

    def load(path: Path) -> TinyModel:
        run = TinyModel(path, kernels="native", max_tokens=40, num_sequences=1)
        digest = weights_digest(path, cache_dir=tmp_path)
        kernels = load_kernel_set("native")
        run.model = load_model(run.config, kernels, cache_dir=tmp_path, digest=digest, packed_cache_bytes=1)
        return run

    def packed() -> list[str]:
        return sorted(path.name[:8] for path in (tmp_path / "packed").iterdir() if path.suffix != ".lock")

    digests = [weights_digest(path, cache_dir=tmp_path).hex()[:8] for path in (first, second)]
    running = load(first)
    load(second)
    assert packed() == sorted(digests), "the first is in use"
    expected = running.logits(random_prompt(9, seed=1))
    del running
    load(tiny_model("qwen3", seed=1))
    assert not set(packed()) & set(digests)
    assert load(first).logits(random_prompt(9, seed=1)).equal(expected)
