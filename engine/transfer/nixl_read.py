"""Plane NIXL, receiver: one-sided READs of the sender's pool, straight into this worker's blocks.

    read the blocks → read their generations, make checksums meanwhile → generations as in the manifest? → checksums?

Generations only grow, so the one read after the bytes says what the one before would have said. A READ that lands
after the lease has ended finds another generation or, at the latest, another checksum.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from engine.transfer.checksum import checksum_at
from engine.transfer.landing import Landing
from engine.transfer.nixl_agent import ROW_WORDS, NixlAgent, Region
from engine.transfer.plane import BLOCKS_PER_READ, Plane, PlaneUnavailable, RemoteBlock, SharedPoolInfo
from engine.transfer.shm_vm import check_checksums, check_generations, check_slots

_HELLO_SECONDS = 2.0


class NixlReceiver:
    """Reads a sender's pool through the agents of both."""

    plane = Plane.NIXL

    def __init__(self, info: SharedPoolInfo, block_bytes: int, agent: NixlAgent) -> None:
        if not info.nixl_metadata:
            raise PlaneUnavailable("the sender has no NIXL agent")
        self._info = info
        self._block_bytes = block_bytes
        self._num_slots = info.pool_bytes // block_bytes
        self._agent = agent
        self._is_open = True
        self._remote = agent.connect(info.nixl_metadata)
        try:
            token = agent.read_words(self._remote, [Region(info.token_address, len(info.token))], _HELLO_SECONDS)
            if token.tobytes() != info.token:
                raise PlaneUnavailable("another process answers")
        except PlaneUnavailable:
            self.close()
            raise

    def read(self, blocks: Sequence[RemoteBlock], addresses: Sequence[int], landing: Landing | None = None) -> None:
        check_slots(blocks, self._num_slots)
        landing = landing or Landing()
        for start in range(0, len(blocks), BLOCKS_PER_READ):
            some, here = blocks[start : start + BLOCKS_PER_READ], addresses[start : start + BLOCKS_PER_READ]
            self._copy(some, here, landing)
            digests: list[int] = []
            make_digests = partial(self._make_digests, here, digests)
            check_generations(some, self._generations([block.slot for block in some], landing, make_digests))
            check_checksums(some, digests)

    def close(self) -> None:
        """The connection goes with its last user and its last read."""
        if self._is_open:
            self._is_open = False
            self._agent.disconnect(self._remote)

    def _copy(self, blocks: Sequence[RemoteBlock], addresses: Sequence[int], landing: Landing) -> None:
        """One descriptor for blocks that lie side by side on both sides."""
        size, targets, sources = self._block_bytes, list[Region](), list[Region]()
        for begin, end in _runs(blocks, addresses, size):
            num_bytes = (end - begin) * size
            targets.append(Region(addresses[begin], num_bytes))
            sources.append(Region(self._info.pool_address + blocks[begin].slot * size, num_bytes))
        self._agent.read(self._remote, targets, sources, landing)

    def _make_digests(self, addresses: Sequence[int], digests: list[int]) -> None:
        digests += [checksum_at(address, self._block_bytes) for address in addresses]

    def _generations(self, slots: Sequence[int], stop: Landing, meanwhile: Callable[[], None]) -> list[int]:
        """Of each slot; in one piece if they lie near each other."""
        first, base = min(slots), self._info.generations_address
        if max(slots) - first < ROW_WORDS:
            piece = Region(base + first * 8, (max(slots) - first + 1) * 8)
            words: list[int] = self._agent.read_words(self._remote, [piece], stop=stop, meanwhile=meanwhile).tolist()
            return [words[slot - first] for slot in slots]
        pieces = [Region(base + slot * 8, 8) for slot in slots]
        found: list[int] = self._agent.read_words(self._remote, pieces, stop=stop, meanwhile=meanwhile).tolist()
        return found


def _runs(blocks: Sequence[RemoteBlock], addresses: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of blocks that lie side by side there and here."""
    begin = 0
    for i in range(1, len(blocks)):
        if blocks[i].slot - blocks[i - 1].slot != 1 or addresses[i] - addresses[i - 1] != size:
            yield begin, i
            begin = i
    yield begin, len(blocks)
