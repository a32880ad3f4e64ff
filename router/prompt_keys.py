"""The block keys of one request's prompt: hashed once, off the event loop, for every place that looks them up."""

from collections.abc import Iterable, Sequence

from kvstore.hashing import adapter_key, block_keys
from kvstore.redis_keys import index_keys
from pagewire.worker_view import AdapterLabel

# (root, block size) of some workers: two during an upgrade, one else.
KeySpace = tuple[bytes, int]


class PromptKeys:
    """Keys by key space; a space that was not prepared is hashed when it is asked for (12 us a block)."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str = "", adapter: AdapterLabel | None = None) -> None:
        self._token_ids = token_ids
        self._adapter = b"" if adapter is None else adapter_key(adapter.digest, adapter.generation)
        self._cache_salt = cache_salt
        self._full: dict[KeySpace, list[bytes]] = {}
        self._index: dict[KeySpace, list[bytes]] = {}

    @property
    def num_tokens(self) -> int:
        """Prompt tokens, those of a partial last block included."""
        return len(self._token_ids)

    def num_unprepared_tokens(self, spaces: Iterable[KeySpace]) -> int:
        """Tokens that `prepare` would hash."""
        return sum(len(self._token_ids) for space in spaces if space not in self._full)

    def prepare(self, spaces: Iterable[KeySpace]) -> None:
        """Hashes; may run in any thread, one at a time."""
        for space in spaces:
            if space not in self._full:
                root, block_size = space
                keys = block_keys(root, self._token_ids, block_size, cache_salt=self._cache_salt, adapter=self._adapter)
                self._index[space] = index_keys(keys)
                self._full[space] = keys

    def of(self, space: KeySpace, output: Sequence[int] = ()) -> list[bytes]:
        """Index keys (16 bytes) of the full blocks of the prompt and, when a request goes on, its output."""
        self.prepare((space,))
        root, block_size = space
        full = self._full[space]
        num_hashed = len(full) * block_size
        if len(self._token_ids) + len(output) - num_hashed < block_size:
            return self._index[space]
        rest = (*self._token_ids[num_hashed:], *output)
        parent = full[-1] if full else None
        more = block_keys(root, rest, block_size, cache_salt=self._cache_salt, adapter=self._adapter, parent=parent)
        return self._index[space] + index_keys(more)
