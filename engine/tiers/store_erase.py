"""Which blocks of a shared store an operator's word reaches, found by what the values themselves say."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.tiers.store_access import StoreAccess
from engine.tiers.store_format import StoreFormat
from kvstore.tier_block import TierBlock

_STEP_SECONDS = 10.0
_KEYS_PER_DELETE = 256


@dataclass(frozen=True, slots=True)
class Doomed:
    """A tenant's blocks (`owner`, as `owner_of` has it), a block and all that continue it (`first`), or everything."""

    owner: bytes | None = None
    first: bytes | None = None


async def erase(access: StoreAccess, form: StoreFormat, doomed: Doomed) -> int:
    """Returns how many blocks went. Raises StoreError: some may be left. What is no block goes too."""
    found: dict[bytes, TierBlock | None] = {}
    cursor = 0
    while True:
        page = await access.ask(access.store.heads(cursor, form.head_bytes), _STEP_SECONDS)
        for key, head in page.heads:
            decoded = form.decode_head(head)
            found[key] = None if decoded is None or decoded[0].key != key else decoded[0]
        cursor = page.next_cursor
        if not cursor:
            break
    keys = doomed_keys(found, doomed)
    for start in range(0, len(keys), _KEYS_PER_DELETE):
        await access.ask(access.store.delete(keys[start : start + _KEYS_PER_DELETE]), _STEP_SECONDS)
    return len(keys)


def doomed_keys(found: Mapping[bytes, TierBlock | None], doomed: Doomed) -> list[bytes]:
    """Of the keys of a store those that have to go, in an order in which what is left is of no use. None: not a block.

    With `first`, whatever has lost a block before it goes too: nobody can tell any more whether it continues that one.
    """
    blocks = {key: block for key, block in found.items() if block is not None}
    keys = [key for key, block in found.items() if block is None]
    if doomed.first is None:
        return keys + [key for key, block in blocks.items() if doomed.owner in (None, block.owner)]
    children: dict[bytes, list[bytes]] = {}
    heads = [doomed.first]
    for key, block in blocks.items():
        if block.parent is not None:
            children.setdefault(block.parent, []).append(key)
            if block.parent not in blocks and block.parent != doomed.first:
                heads.append(key)
    for key in heads:  # grows while it is walked
        heads += children.get(key, ())
    return keys + [key for key in dict.fromkeys(heads) if key in blocks]
