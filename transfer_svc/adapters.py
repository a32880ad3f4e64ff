"""A worker's adapters as services see them: engine errors become status codes, engine objects plain data."""

from functools import partial
from pathlib import Path
from typing import Any

from engine.host import EngineHost
from engine.lora.errors import AdapterError, AdapterLimit, AdapterNotFound, AdapterOutdated
from engine.lora.store import MAX_NAME_CHARS, AdapterStore, LoadedAdapter
from engine.request import AdapterId
from pagewire.errors import ADAPTER_NOT_FOUND, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from pagewire.worker_view import AdapterLabel, AdapterView


class WorkerAdapters:
    """Those of one worker. Everything but `load` answers at once."""

    def __init__(self, host: EngineHost[Any]) -> None:
        self._host = host
        self._seen: tuple[object, ...] = ()
        self._views: tuple[AdapterView, ...] = ()

    def find(self, label: AdapterLabel | None) -> AdapterId | None:
        """For a request. Raises NotFound if this very load is not here."""
        if label is None:
            return None
        try:
            return self._host.engine.find_adapter(label.name, label.digest, label.generation)
        except AdapterNotFound as error:
            raise _not_found(error, label.name) from None

    async def load(
        self, name: str, path: str, generation: int, *, check_only: bool, digest: bytes = b""
    ) -> AdapterView:
        """Reads it on another thread; streams go on. Raises PagewireError."""
        store = self._store(name)
        try:
            load = partial(store.load, name, Path(path), generation, check_only=check_only, digest=digest)
            loaded = await self._host.in_adapter_thread(load)
        except AdapterLimit as error:
            raise ResourceExhausted(str(error), subject="max_cpu_loras") from None
        except AdapterOutdated as error:
            raise FailedPrecondition(str(error), reason="ADAPTER_OUTDATED", metadata={"adapter": name}) from None
        except AdapterError as error:
            raise InvalidArgument("adapter", name, f"can't be served: {error}") from None
        finally:
            self._host.announce()  # a load goes through also when nobody waits for it any more
        return _view(loaded, store)

    def unload(self, name: str, generation: int = 0) -> bool:
        """Whether it was here; with a `generation` that load is taken back. Raises NotFound without one."""
        try:
            store = self._store(name)
            if generation:
                was_here = store.take_back(name, generation) is not None
                self._host.announce()
                return was_here
            store.unload(name)
        except AdapterNotFound as error:
            raise _not_found(error, name) from None
        self._host.announce()
        return True

    def views(self) -> tuple[AdapterView, ...]:
        """All, by name, then those that linger; the same object as long as nothing has changed."""
        store = self._host.engine.adapters
        if store is None:
            return ()
        now = loaded, retired, _ = (store.loaded(), store.retired(), store.resident)
        if now != self._seen:
            self._seen = now
            self._views = (
                *(_view(each, store) for each in loaded),
                *(_view(each, store, retired=True) for each in retired),
            )
        return self._views

    def _store(self, name: str) -> AdapterStore:
        store = self._host.engine.adapters
        if store is None:
            raise InvalidArgument("adapter", name, "can't be served: this worker was started without enable_lora")
        return store


def _view(loaded: LoadedAdapter, store: AdapterStore, *, retired: bool = False) -> AdapterView:
    label = AdapterLabel(loaded.id.name, loaded.id.digest, loaded.id.generation)
    return AdapterView(label, loaded.rank, loaded.path, loaded.num_bytes, loaded.id.key in store.resident, retired)


def _not_found(error: AdapterNotFound, name: str) -> NotFound:
    return NotFound(str(error), reason=ADAPTER_NOT_FOUND, metadata={"adapter": name[:MAX_NAME_CHARS]})
