"""What an operator may do with a worker's cached prefixes: the protocol, and the messages as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagewire.errors import InvalidArgument
from pagewire.v1 import inference_pb2
from pagewire.worker_view import AdapterLabel, PrefixSource

MAX_TTL_SECONDS = 7 * 86400
MAX_SALT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt's token ids, the tenant's salt and the load of an adapter that it was computed with."""

    token_ids: tuple[int, ...]
    cache_salt: str = ""
    adapter: AdapterLabel | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """Leading full blocks of a prompt by tier ("device", "host", "disk"), and those of them that are pinned."""

    num_blocks: Mapping[str, int] = field(default_factory=dict)
    num_pinned_blocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moved:
    """Leading blocks on the device now, and those of them that were brought for this."""

    num_blocks: int
    num_moved_blocks: int


class PrefixControl(Protocol):
    """A worker's side. All methods run on the event loop; none waits for a request."""

    async def look_up(self, prefix: Prefix) -> Holding:
        """What is cached of it."""
        ...

    async def pin(self, prefix: Prefix, ttl_seconds: int) -> Holding:
        """Keeps it for so long; 0 ends that. Raises NotFound or ResourceExhausted, then nothing has changed."""
        ...

    async def clear(self, prefix: Prefix, first_block: int) -> int:
        """Forgets its blocks from that one on and what continues them, in every tier; returns how many."""
        ...

    async def remove_moved(self, prefix: Prefix, last_block: int) -> int:
        """Its blocks up to that one are on another worker now: forgets that one and what continues it, and those before
        it that nothing else continues and no other pin keeps, on the device and below; returns how many."""
        ...

    async def clear_tenant(self, cache_salt: str) -> int:
        """Forgets everything of that salt, in every tier; returns how many blocks."""
        ...

    async def clear_adapter(self, name: str) -> int:
        """Forgets everything that any load of that adapter has computed, in every tier; returns how many blocks."""
        ...

    async def bring(self, prefix: Prefix, sources: Sequence[PrefixSource]) -> Moved:
        """Brings up what own tiers have and fetches what others have."""
        ...


def prefix_of(
    request: inference_pb2.GenerateRequest, block_size: int, vocab_size: int, adapter: AdapterLabel | None = None
) -> Prefix:
    """The prompt of a request to a worker. Raises InvalidArgument naming the field."""
    if request.WhichOneof("prompt") != "tokens":
        raise InvalidArgument("request.prompt", request.WhichOneof("prompt"), "must be tokens: a worker reads no text")
    token_ids = tuple(request.tokens.token_ids)
    if len(token_ids) < block_size:
        limit = f"must be at least {block_size}, one block; only full blocks are cached"
        raise InvalidArgument("request.tokens.token_ids", len(token_ids), limit)
    if max(token_ids) >= vocab_size:
        raise InvalidArgument("request.tokens.token_ids", max(token_ids), f"must be below {vocab_size}")
    check_salt("request.cache_salt", request.cache_salt)
    return Prefix(token_ids, request.cache_salt, adapter)


def check_salt(field: str, cache_salt: str) -> None:
    """Raises InvalidArgument for one that no request can have."""
    num_bytes = len(cache_salt.encode())
    if num_bytes > MAX_SALT_BYTES:
        raise InvalidArgument(field, num_bytes, f"must be at most {MAX_SALT_BYTES} bytes")


def check_adapter_name(name: str) -> None:
    """Raises InvalidArgument; it need not be loaded (any more)."""
    if not name:
        raise InvalidArgument("adapter_name", name, "must name an adapter; cache_salt and request are the model's own")


def check_ttl(ttl_seconds: int) -> None:
    """Raises InvalidArgument."""
    if ttl_seconds > MAX_TTL_SECONDS:
        raise InvalidArgument("ttl_seconds", ttl_seconds, f"must be at most {MAX_TTL_SECONDS}, a week; 0 ends a pin")
