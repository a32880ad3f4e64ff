"""Section files: what was written is what is mapped, and any harm is noticed."""

import mmap
from pathlib import Path

import pytest
import torch

from engine.section_file import SectionFile, SectionFileError, SectionWriter

SIZES = {"small": 1, "a page": 4096, "odd": 5000}


def write(file: Path) -> None:
    with SectionWriter(file) as writer:
        for number, (name, size) in enumerate(SIZES.items()):
            with writer.section(name, size) as data:
                assert data.data_ptr() % mmap.PAGESIZE == 0
                assert not data.any()
                data.fill_(number + 1)
        writer.finish()


def is_whole(file: Path) -> bool:
    try:
        SectionFile(file)
    except SectionFileError:
        return False
    return True


def test_what_was_written_is_mapped(tmp_path: Path) -> None:
    write(tmp_path / "file")
    sections = SectionFile(tmp_path / "file")
    for number, (name, size) in enumerate(SIZES.items()):
        data = sections.tensor(name, size)
        assert data.data_ptr() % mmap.PAGESIZE == 0
        assert torch.equal(data, torch.full((size,), number + 1, dtype=torch.uint8))
    for name, size in (("other", 1), ("odd", 4999)):
        with pytest.raises(SectionFileError, match=f"section {name} of {size} bytes is not there"):
            sections.tensor(name, size)


def test_any_harm_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write(file)
    whole = file.read_bytes()
    cuts = {"empty": b"", "cut": whole[:-1], "cut to pages": whole[:8192], "longer": whole + b"x"}
    # one bit in a section, in the index, in the trailer's offset, digest and magic
    places = (0, 4096 + 17, 8192 + 4999, whole.index(b'{"small"') + 3, len(whole) - 64, len(whole) - 40, len(whole) - 1)
    flips = {place: whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :] for place in places}
    for case, content in (cuts | flips).items():
        file.write_bytes(content)
        assert not is_whole(file), case
    file.write_bytes(whole)
    assert is_whole(file)


def test_without_the_end_there_is_no_file(tmp_path: Path) -> None:
    with SectionWriter(tmp_path / "file") as writer, writer.section("a", 100) as data:
        data.fill_(1)
    with pytest.raises(SectionFileError):
        SectionFile(tmp_path / "file")
