"""The adapters in host memory, by the name that requests use. A bad one changes nothing."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.lora.checkpoint import WEIGHTS_FILE, Module, read_adapter
from engine.lora.config import CONFIG_FILE
from engine.lora.errors import AdapterError, AdapterLimit, AdapterNotFound, AdapterOutdated
from engine.model_config import ModelConfig
from engine.request import AdapterId

MAX_NAME_CHARS = 128
LINGER_SECONDS = 60.0
"""How long a load that was replaced or unloaded is still found by who names it exactly: requests are on their way
with it, from routers that have not heard yet, or from a prefill to its decode worker."""
TAKE_BACK_SECONDS = 180.0
"""For which a load can be taken back, and what it replaced restored: longer than a router waits for it (`LOAD_SECONDS`
in router/adapter_keeper.py) and then for what takes it back."""
_FORBIDDEN = frozenset('\\"\x7f') | {chr(code) for code in range(32)}


class _Retired(NamedTuple):
    """Found by who names it exactly, until a time; `replaced_by` is None if it was unloaded."""

    adapter: "LoadedAdapter"
    until: float
    replaced_by: AdapterId | None = None


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter under its name; `path` is where it came from, `rank` its largest."""

    id: AdapterId
    path: str
    rank: int
    num_bytes: int


class AdapterStore:
    """Any thread may call it. Requests keep what they have found, whatever is unloaded meanwhile.

    A load that was replaced or unloaded lingers, unless its place is needed: it counts among `max_adapters`, but the
    latest one always stays, and no load is refused on account of one that lingers.

    Adapters named at run time must lie below `root`; without one, none can be. Those named at start may lie anywhere.
    """

    def __init__(
        self,
        config: ModelConfig,
        modules: Mapping[str, Module],
        *,
        max_rank: int,
        max_adapters: int,
        root: Path | None = None,
        reserved: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._modules = modules
        self._max_rank = max_rank
        self._max_adapters = max_adapters
        self._root = None if root is None else root.resolve()
        self._reserved = reserved
        self._lock = threading.Lock()
        self._clock = clock
        self._loaded: dict[str, LoadedAdapter] = {}
        self._retired: dict[AdapterId, _Retired] = {}
        """In the order in which they were retired."""
        self._taken_back: dict[tuple[str, int], float] = {}
        """Name and generation of loads that must not come any more, with the time until which that is known."""
        self.resident: frozenset[bytes] = frozenset()
        """Keys of those on the device, as of the last step."""

    def load(
        self,
        name: str,
        path: Path,
        generation: int,
        *,
        below_root: bool = True,
        check_only: bool = False,
        digest: bytes = b"",
    ) -> LoadedAdapter:
        """Reads and checks an adapter and, unless `check_only`, makes it known. Raises AdapterError.

        A name that is known is replaced; the same name with the same content and generation changes nothing. An older
        generation than the name has had is refused, and another content than `digest`'s, if that is given.
        """
        self._check_name(name)
        directory = self._directory(path, below_root)
        adapter = read_adapter(directory, self._config, self._modules, self._max_rank)
        if digest and digest != adapter.digest:
            raise AdapterOutdated(
                f"{directory}: its digest is {adapter.digest.hex()[:16]}, must be {digest.hex()[:16]}, as checked"
            )
        loaded = LoadedAdapter(
            AdapterId(name, adapter.digest, generation, adapter), str(directory), adapter.rank, adapter.num_bytes
        )
        with self._lock:
            known = self._loaded.get(name)
            if known is not None and known.id == loaded.id:
                return known
            self._check_generation(loaded.id)
            if known is None and len(self._loaded) >= self._max_adapters:
                raise AdapterLimit(
                    f"{len(self._loaded)} adapters are loaded, the limit (max_cpu_loras) is {self._max_adapters}"
                )
            if not check_only:
                self._loaded = {**self._loaded, name: loaded}
                self._retire(known, replaced_by=loaded.id)
        return loaded

    def take_back(self, name: str, generation: int) -> LoadedAdapter | None:
        """Undoes a load, also one that is still being read: it will be refused. None if it was not here.

        What it replaced has the name again, unless its place was needed meanwhile.
        """
        with self._lock:
            self._taken_back[name, generation] = self._clock() + TAKE_BACK_SECONDS
            found = self._loaded.get(name)
            if found is None or found.id.generation != generation:
                return None
            before = next((each for each in self._retired.values() if each.replaced_by == found.id), None)
            self._loaded = {known: each for known, each in self._loaded.items() if known != name}
            if before is not None:
                del self._retired[before.adapter.id]
                self._loaded[name] = before.adapter
            self._retire(found)
        return found

    def unload(self, name: str) -> LoadedAdapter:
        """New requests no longer find it; those that run go on. Raises AdapterNotFound."""
        with self._lock:
            found = self._loaded.get(name)
            if found is None:
                raise self._unknown(name)
            self._loaded = {known: each for known, each in self._loaded.items() if known != name}
            self._retire(found)
        return found

    def find(self, name: str, digest: bytes = b"", generation: int | None = None) -> AdapterId:
        """The adapter for a request. Raises AdapterNotFound, also when another content or load has its name now."""
        with self._lock:
            self._retire(None)
            found = self._loaded.get(name)
            retired = None if generation is None else self._retired.get(AdapterId(name, digest, generation))
        if retired is not None:
            return retired.adapter.id
        if found is None:
            raise self._unknown(name)
        if (digest and digest != found.id.digest) or (generation is not None and generation != found.id.generation):
            raise AdapterNotFound(
                f"adapter {name!r} was loaded anew: generation {found.id.generation} with digest "
                f"{found.id.digest.hex()[:16]} is here, {generation} with {digest.hex()[:16]} was asked for"
            )
        return found.id

    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """All of them, by name."""
        return tuple(each for _, each in sorted(self._loaded.items()))

    def retired(self) -> tuple[LoadedAdapter, ...]:
        """Those that linger: not for new requests. The rest of them is freed here."""
        with self._lock:
            self._retire(None)
            return tuple(each.adapter for each in self._retired.values())

    def _retire(self, replaced: LoadedAdapter | None, replaced_by: AdapterId | None = None) -> None:
        """With the lock: forgets those whose time is over and those that there is no place for."""
        now = self._clock()
        if replaced is not None:
            seconds = LINGER_SECONDS if replaced_by is None else TAKE_BACK_SECONDS
            self._retired[replaced.id] = _Retired(replaced, now + seconds, replaced_by)
        places = max(1, self._max_adapters - len(self._loaded))
        for i, (adapter, retired) in enumerate(reversed(list(self._retired.items()))):
            if i >= places or retired.until <= now:
                del self._retired[adapter]
        self._taken_back = {load: until for load, until in self._taken_back.items() if until > now}

    def _check_generation(self, adapter: AdapterId) -> None:
        """With the lock: loads may arrive in another order than they were made in."""
        if (adapter.name, adapter.generation) in self._taken_back:
            raise AdapterOutdated(f"generation {adapter.generation} of adapter {adapter.name!r}: was taken back")
        own = [self._loaded[adapter.name].id] if adapter.name in self._loaded else []
        own += [each for each in self._retired if each.name == adapter.name]
        newest = max((each.generation for each in own), default=-1)
        if adapter.generation <= newest:
            raise AdapterOutdated(
                f"generation {adapter.generation} of adapter {adapter.name!r}: generation {newest} was loaded already"
            )

    def _unknown(self, name: str) -> AdapterNotFound:
        known = ", ".join(sorted(self._loaded)) or "none"
        return AdapterNotFound(f"adapter {name!r} is not loaded; loaded are: {known}")

    def _check_name(self, name: str) -> None:
        if not 1 <= len(name) <= MAX_NAME_CHARS or _FORBIDDEN & set(name):
            raise AdapterError(
                f"name {name[:MAX_NAME_CHARS]!r}: must have 1 … {MAX_NAME_CHARS} characters, "
                "no quotes or control characters"
            )
        if name in self._reserved:
            raise AdapterError(f"name {name!r}: is the base model's")

    def _directory(self, path: Path, below_root: bool) -> Path:
        """The adapter's own directory, links followed. What lies in it may lead nowhere else."""
        if below_root and self._root is None:
            raise AdapterError("no adapter can be loaded at run time: this worker was started without lora_root")
        base = self._root if below_root and self._root is not None else Path.cwd()
        try:
            directory = (base / path).resolve()
            allowed = base if below_root else directory
            for file in (directory, directory / CONFIG_FILE, directory / WEIGHTS_FILE):
                if not file.resolve().is_relative_to(allowed):
                    raise AdapterError(f"path {str(path)!r}: {file.name} leads outside {allowed}")
            if not directory.is_dir():
                raise AdapterError(f"path {str(path)!r}: {directory} is no directory")
        except (OSError, ValueError) as error:
            if isinstance(error, AdapterError):
                raise
            raise AdapterError(f"path {str(path)[:200]!r}: {error}") from error
        return directory


def parse_lora_modules(entries: tuple[str, ...]) -> dict[str, Path]:
    """`NAME=PATH` each. Raises AdapterError."""
    found: dict[str, Path] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not equals or not name or not path:
            raise AdapterError(f"lora_modules: {entry!r} is not NAME=PATH")
        if name in found:
            raise AdapterError(f"lora_modules: {name!r} is named twice")
        found[name] = Path(path)
    return found
