"""Which blocks of a shared store an operator's word reaches, found by what the values themselves say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.tiers.store_access import StoreAccess
from engine.tiers.store_format import StoreFormat
from kvstore.tier_block import Owned

_STEP_SECONDS = 10.0
_KEYS_PER_DELETE = 256


@dataclass(frozen=True, slots=True)
class Doomed:
    """A tenant's or an adapter's blocks (`owned`), a block and all that continue it (`first`), or everything."""

    owned: Owned | None = None
    first: bytes | None = None


async def erase(access: StoreAccess, form: StoreFormat, doomed: Doomed) -> int:
    """Returns how many blocks went. Raises StoreError: some may be left. What is no block goes too."""
    num_erased = 0
    parents: dict[bytes, bytes | None] = {}
    cursor = 0
    while True:
        page = await access.ask(access.store.heads(cursor, form.head_bytes), _STEP_SECONDS)
        keys = []
        for key, head in page.heads:
            block = form.block_of(key, head)
            if block is not None and doomed.first is not None:
                parents[key] = block.parent  # who continues what is known at the end
            elif block is None or doomed.owned is None or doomed.owned.has(block.owner):
                keys.append(key)
        num_erased += await _delete(access, keys)
        cursor = page.next_cursor
        if not cursor:
            break
    return num_erased if doomed.first is None else num_erased + await _delete(access, keys_after(doomed.first, parents))


async def _delete(access: StoreAccess, keys: Sequence[bytes]) -> int:
    for start in range(0, len(keys), _KEYS_PER_DELETE):
        await access.ask(access.store.delete(keys[start : start + _KEYS_PER_DELETE]), _STEP_SECONDS)
    return len(keys)


def keys_after(first: bytes, parents: Mapping[bytes, bytes | None]) -> list[bytes]:
    """`first` and all that continue it, in an order in which what is left is of no use. `parents` has all blocks there.

    Whatever has lost a block before it goes too: nobody can tell any more whether it continues `first`.
    """
    children: dict[bytes, list[bytes]] = {}
    heads = [first]
    for key, parent in parents.items():
        if parent is not None:
            children.setdefault(parent, []).append(key)
            if parent not in parents and parent != first:
                heads.append(key)
    for key in heads:  # grows while it is walked
        heads += children.get(key, ())
    return [key for key in dict.fromkeys(heads) if key in parents]
