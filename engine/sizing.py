"""How many KV blocks an engine gets, and the longest sequence that fits them."""

import logging
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError
from kvstore.kv_groups import KvGroups

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks in the pool, and the longest sequence (prompt and output) in tokens."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Bytes that the pool may take, and who says so."""

    num_bytes: int
    source: str


def size_pool(
    *,
    block_bytes: int,
    draft_block_bytes: int = 0,
    block_size: int,
    max_num_seqs: int,
    max_position: int,
    max_model_len: int | None,
    kv_cache_memory_bytes: int | None,
    kv_cache_memory_share: float,
    available_bytes: int,
    budget: PoolBudget | None = None,
    groups: KvGroups | None = None,
) -> PoolSize:
    """Sizes the pool by `kv_cache_memory_bytes`, else by the device's `budget`, else by its share of `available_bytes`,
    and logs the outcome.

    A share is capped to what `max_num_seqs` sequences of full length can use. The pool holds at least one sequence of
    `max_model_len`, or that limit is lowered. A block takes `draft_block_bytes` more in a draft model's memory.
    `groups` say how many blocks a sequence holds; None: one for each `block_size` tokens. Raises EngineError when
    nothing useful fits.
    """
    groups = KvGroups(block_size=block_size) if groups is None else groups
    of_draft = f" ({draft_block_bytes} of them for the draft model)" if draft_block_bytes else ""
    block_bytes += draft_block_bytes
    if max_model_len is not None and max_model_len > max_position:
        raise EngineError(f"max_model_len = {max_model_len}: the model has {max_position} positions")
    longest = max_position if max_model_len is None else max_model_len
    if kv_cache_memory_bytes is not None:
        source = f"kv_cache_memory_bytes = {kv_cache_memory_bytes}"
        num_blocks = kv_cache_memory_bytes // block_bytes
    elif budget is not None:  # not capped: nobody else wants a GPU's memory
        source, num_blocks = budget.source, budget.num_bytes // block_bytes
    else:
        source = f"{kv_cache_memory_share:.0%} of the {_mib(available_bytes)} that are free"
        share = int(available_bytes * kv_cache_memory_share)
        num_blocks = min(share // block_bytes, max_num_seqs * groups.num_pool_blocks(longest))
    fits = groups.longest_sequence(num_blocks, longest)
    if fits < min(2, longest) or num_blocks * block_size < 2:
        raise EngineError(
            f"{source}: no room for two tokens, a block of {block_size} takes {block_bytes} bytes{of_draft}"
        )
    if fits < longest:
        logger.warning(
            "max_model_len lowered from %d to %d: the KV pool (%s) holds %d blocks of %d tokens",
            longest,
            fits,
            source,
            num_blocks,
            block_size,
        )
    logger.info(
        "KV pool: %d blocks of %d tokens%s, %s%s (%s); max_model_len %d",
        num_blocks,
        block_size,
        "" if groups.is_plain else f" in {len(groups)} groups of layers",
        _mib(num_blocks * block_bytes),
        f", {_mib(num_blocks * draft_block_bytes)} of it the draft model's" if draft_block_bytes else "",
        source,
        fits,
    )
    return PoolSize(num_blocks, fits)


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still take: the system's, or fewer where a control group allows fewer."""
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, usage = _read_int(cgroup / "memory.max"), _read_int(cgroup / "memory.current")
    return available if limit is None or usage is None else min(available, max(0, limit - usage))


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
