"""Blocks on disk outlive the process; whatever happened to it, or to the disk, no wrong byte comes back."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from engine.tiers.disk_format import FILE_HEADER_BYTES, decode_record, encode_record, record_bytes
from engine.tiers.disk_slots import DiskSlots
from engine.tiers.host_slots import HostSlots
from engine.tiers.tier import Bytes
from engine.transfer.checksum import checksum
from kvstore.block_store import StoreError
from kvstore.tier_block import Entry, Owned, TierBlock, owner_of
from kvstore.tier_book import TierBook
from tests.engine.harness import BLOCK_SIZE, Harness, prompt_of

MODEL, OTHER_MODEL = b"m" * 32, b"o" * 32
PROMPT = prompt_of(22, salt=3)  # five full blocks and a rest
FILE = Path("0", "blocks.kv")
SIZE = 1 << 16


class OffThread(DiskSlots):
    """Says if anybody but the tiers' own threads waits for the disk; the disk may be full after some slots."""

    full_at: int = 1 << 30
    refusal: int = errno.ENOSPC

    def write(self, entry: Entry, source: Bytes) -> int:
        self._check_thread()
        if entry.slot >= self.full_at:
            raise OSError(self.refusal, os.strerror(self.refusal))
        return super().write(entry, source)

    def read(self, entry: Entry, target: Bytes) -> None:
        self._check_thread()
        super().read(entry, target)

    def _check_thread(self) -> None:
        assert threading.current_thread().name.startswith("tier-"), "the step thread does I/O"


@contextmanager
def running(
    path: Path, model: bytes = MODEL, size: int = SIZE, full_at: int = 1 << 30, refusal: int = errno.ENOSPC, **more: int
) -> Iterator[Harness]:
    """A scheduler with a disk tier, checked at the end."""

    def make(block_size: int, block_bytes: int) -> DiskSlots:
        slots = OffThread(path, size, model, block_size, block_bytes)
        slots.full_at, slots.refusal = full_at, refusal
        return slots

    harness = Harness(num_blocks=16, disk=make, **more)
    yield harness
    harness.run()
    harness.check_outputs()
    harness.check_idle()


def ask(harness: Harness, name: str = "again", salt: str = "") -> dict[str, int]:
    """Runs the prompt to its end; returns what came from which tier."""
    harness.ask(name, PROMPT, max_tokens=4, cache_salt=salt)
    harness.run()
    assert harness.tiers is not None
    assert harness.tiers.quiesce()
    return harness.loaded[name]


def warm(path: Path, salt: str = "") -> None:
    with running(path) as harness:
        ask(harness, salt=salt)


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    """CASES D6: another process computes the same keys."""
    warm(tmp_path)
    with running(tmp_path) as harness:
        assert ask(harness) == {"disk": 20}
        assert harness.cached["again"] == 20


def test_another_model_finds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CASES D3: other weights under the same path; and the old blocks are gone for good."""
    warm(tmp_path)
    with running(tmp_path, OTHER_MODEL) as harness:
        assert ask(harness) == {}
    assert "holds KV of another model, layout or machine: it is emptied" in caplog.text
    with running(tmp_path) as harness:
        assert ask(harness) == {}


def test_another_tenant_finds_nothing(tmp_path: Path) -> None:
    """CASES D5: after a restart, when nobody knows the salts any more."""
    warm(tmp_path, salt="a")
    assert b"a-secret" not in (tmp_path / FILE).read_bytes()
    with running(tmp_path) as harness:
        assert ask(harness, "b", salt="b") == {}
        assert harness.tiers is not None
        assert harness.tiers.clear(Owned.by_tenant("a")) > 0
        assert ask(harness, "a", salt="a") == {}


@pytest.mark.parametrize("what", ["payload", "record", "end", "everything"])
def test_a_damaged_file_is_never_believed(tmp_path: Path, what: str) -> None:
    warm(tmp_path)
    content = bytearray((tmp_path / FILE).read_bytes())
    slot_bytes = record_bytes(BLOCK_SIZE) + 8 * BLOCK_SIZE
    at = FILE_HEADER_BYTES + 2 * slot_bytes  # the third block
    if what == "payload":
        content[at + record_bytes(BLOCK_SIZE) + 3] ^= 1
    elif what == "record":
        content[at + 20] ^= 1
    elif what == "end":
        del content[at + slot_bytes // 2 :]
    else:
        content[:] = random.Random(1).randbytes(len(content))
    (tmp_path / FILE).write_bytes(content)
    with running(tmp_path) as harness:
        assert ask(harness) == ({} if what == "everything" else {"disk": 8})
    with running(tmp_path) as harness:
        assert ask(harness) == {"disk": 20}


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_keeps_what_it_has_room_for(tmp_path: Path, caplog: pytest.LogCaptureFixture, refusal: int) -> None:
    with running(tmp_path, full_at=5, refusal=refusal) as harness:
        harness.ask("other", 22, max_tokens=1)
        harness.run()
        assert harness.tiers is not None
        assert harness.tiers.quiesce()
        assert ask(harness) == {}
        harness.cache.reset()
        assert ask(harness, "more") == {"disk": 20}, "it evicts once it cannot grow"
    assert caplog.text.count("blocks cannot be written") == 1


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    slot_bytes = record_bytes(BLOCK_SIZE) + 8 * BLOCK_SIZE
    with running(tmp_path, size=FILE_HEADER_BYTES + 3 * slot_bytes + 5) as harness:
        ask(harness)
        assert (tmp_path / FILE).stat().st_size == FILE_HEADER_BYTES + 3 * slot_bytes
    with running(tmp_path, size=FILE_HEADER_BYTES + 2 * slot_bytes) as harness:
        assert ask(harness) == {"disk": 8}


def test_host_memory_first_and_the_disk_behind_it(tmp_path: Path) -> None:
    with running(tmp_path, num_host_blocks=3) as harness:
        ask(harness, "first")
        harness.cache.reset()
        assert ask(harness) == {"host": 12, "disk": 8}
    with running(tmp_path, num_host_blocks=3) as harness:
        assert ask(harness) == {"disk": 20}
        harness.cache.reset()
        assert ask(harness, "promoted") == {"host": 12, "disk": 8}


def test_what_was_cleared_does_not_come_back(tmp_path: Path) -> None:
    """Neither what the tier had, nor what it had evicted and not yet written over."""
    with running(tmp_path) as harness:
        ask(harness)
        assert harness.tiers is not None
        assert harness.tiers.clear() == 6
    with running(tmp_path) as harness:
        assert ask(harness) == {}


def test_what_is_cleared_on_its_way_from_host_memory_to_the_disk_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go, read = threading.Event(), threading.Event(), HostSlots.read

    def read_slowly(slots: HostSlots, entry: Entry, target: Bytes) -> None:
        read(slots, entry, target)
        if threading.current_thread().name == "tier-disk":
            reading.set()
            assert go.wait(60)

    with running(tmp_path, num_host_blocks=8, full_at=0, refusal=errno.EIO) as harness:
        ask(harness, "first", salt="a")  # only host memory keeps it
        tiers = harness.tiers
        assert tiers is not None
        disk, writer = tiers.tiers[1], tiers._writers[1]
        assert isinstance(disk.slots, OffThread)
        disk.slots.full_at = 1 << 30
        monkeypatch.setattr(HostSlots, "read", read_slowly)
        tiers.note_use(harness.cache.keys_for(PROMPT, "a"))
        assert reading.wait(60)
        harness.cache.reset()
        erase = writer.erase
        monkeypatch.setattr(writer, "erase", lambda: (go.set(), erase())[1])
        assert tiers.clear(Owned.by_tenant("a")) == 6
        assert tiers.quiesce()
        assert disk.num_ready == 0
        assert (tmp_path / FILE).read_bytes().count(b"PWKVBLCK") == 0


def test_who_clears_is_told_when_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be erased is, and the next try erases the rest."""
    broken = [2]

    def unseal(slots: DiskSlots, slot: int) -> None:
        if slot in broken:
            raise OSError(errno.EIO, "Input/output error")
        erase_slot(slots, slot)

    erase_slot = DiskSlots._unseal
    with running(tmp_path) as harness:
        ask(harness)
        assert harness.tiers is not None
        monkeypatch.setattr(DiskSlots, "_unseal", unseal)
        with pytest.raises(StoreError, match=r"tier disk: .*Input/output error"):
            harness.tiers.clear()
        assert (tmp_path / FILE).read_bytes().count(b"PWKVBLCK") == 1
        broken.clear()
        assert harness.tiers.clear() == 0
        assert (tmp_path / FILE).read_bytes().count(b"PWKVBLCK") == 0
    with running(tmp_path) as harness:
        assert ask(harness) == {}


def test_processes_do_not_share_a_place(tmp_path: Path) -> None:
    with running(tmp_path) as first, running(tmp_path) as second:
        ask(first)
        ask(second)
        assert {path.parent.name for path in tmp_path.glob("*/blocks.kv")} == {"0", "1"}
    with running(tmp_path, OTHER_MODEL) as other:
        ask(other)  # takes place 0
    with running(tmp_path) as harness:
        assert ask(harness) == {"disk": 20}, "place 1 is still ours"


def test_a_record_is_read_as_it_was_written() -> None:
    block = TierBlock(b"k" * 32, b"p" * 32, tuple(range(2**32 - 4, 2**32)), owner_of("salt"))
    record = encode_record(block, 2**64 - 1)
    assert len(record) == record_bytes(4)
    assert decode_record(record, 4) == (block, 2**64 - 1)
    for at in range(0, 200, 7):
        broken = record[:at] + bytes([record[at] ^ 4]) + record[at + 1 :]
        assert decode_record(broken, 4) is None or at >= 8 + 32 + 32 + 16 + 8 + 16 + 8
    assert decode_record(bytes(len(record)), 4) is None


BLOCK_BYTES = 1 << 16
WRITER = """
import sys, numpy as np
from pathlib import Path
from engine.tiers.disk_slots import DiskSlots
from kvstore.tier_block import TierBlock
from kvstore.tier_book import TierBook
slots = DiskSlots(Path(sys.argv[1]), 24 * 70000, b"m" * 32, 4, 1 << 16)
book = TierBook(slots.num_slots)
print(slots.restore(book), flush=True)
number, parent = int(sys.argv[2]), None
while True:
    key = number.to_bytes(32, "little")
    entry = book.begin_store(TierBlock(key, parent, (number,) * 4), 0.0)
    if entry is not None:
        digest = slots.write(entry, np.full(1 << 16, number % 251, np.uint8))
        slots.seal(entry, digest)
        book.finish_store(entry, digest)
    number, parent = number + 1, key if number % 6 else None
"""


def test_kill_in_the_middle_of_writes(tmp_path: Path) -> None:
    """CASES F12: each time, what the next process finds is whole and right."""
    rng, num_found = random.Random(5), 0
    for attempt in range(3):
        arguments = [sys.executable, "-c", WRITER, str(tmp_path), str(1 + 1000 * attempt)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline(), "the writer did not start"
            time.sleep(rng.uniform(0.02, 0.1))
            writer.send_signal(signal.SIGKILL)
        slots = DiskSlots(tmp_path, 24 * 70000, MODEL, 4, BLOCK_BYTES)
        assert slots.path == tmp_path / FILE, "the lock of a killed process goes with it"
        book = TierBook(slots.num_slots)
        slots.restore(book)
        num_found += book.num_ready
        for key in book.ready_keys():
            entry, target = book.read(key), np.empty(BLOCK_BYTES, np.uint8)
            assert entry is not None
            slots.read(entry, target)
            assert checksum(target.data) == entry.checksum
            assert set(target.tolist()) == {entry.block.token_ids[0] % 251}
            book.release([entry])
        slots.close()
    assert num_found >= 15
