"""READs that were posted to NIXL: whether they are over, and what is not known of those that failed."""

import logging
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_DISCONNECTED = "nixlRemoteDisconnectError"  # by name, since its class is only in the bindings


@dataclass(eq=False, slots=True)
class Remote:
    """Another agent that this one may read from. `is_broken`: nothing more is posted to it.

    `is_dead`: the connection's end was seen, so that nothing lands any more.
    """

    name: str
    metadata: bytes
    num_users: int = 0
    is_broken: bool = False
    is_dead: bool = False
    pending: set["NixlRead"] = field(default_factory=set)

    def failed(self, error: Exception) -> None:
        """NIXL raised this for one of its reads."""
        self.is_broken = True
        self.is_dead = self.is_dead or type(error).__name__ == _DISCONNECTED


class NixlRead:
    """One posted READ. `error` says why it failed.

    A read that failed is over only if its connection is dead: otherwise some of its descriptors may have been posted,
    and their bytes may land until the agent closes.
    """

    def __init__(self, agent: "Poster", remote: Remote, handle: Any) -> None:
        self.error: str | None = None
        self._agent = agent
        self._remote = remote
        self._handle = handle
        self._lock = threading.Lock()

    def failed(self, error: Exception) -> None:
        """Whatever NIXL raised."""
        self.error = self.error or str(error) or type(error).__name__
        self._remote.failed(error)

    def done(self) -> None:
        """NIXL said so."""
        with self._lock:
            if self._handle is not None:
                self._finish()

    def is_over(self) -> bool:
        """Looks, and frees the handle at the end."""
        with self._lock:
            if self._handle is None:
                return True
            try:
                is_done = self._agent.poll(self._handle)
            except Exception as error:
                self.failed(error)
                is_done = False
            if is_done or (self.error is not None and self._remote.is_dead):
                self._finish()
            return self._handle is None

    def abandon(self) -> None:
        """The agent closes; that ends the read, too."""
        with self._lock:
            if self._handle is not None:
                self.error = self.error or "closed"
                self._finish()

    def _finish(self) -> None:
        handle, self._handle = self._handle, None
        try:
            handle.release()
        except Exception as error:
            logger.info("a handle of a read from NIXL agent %s was not released: %s", self._remote.name, error)
        self._agent.forget(self._remote, self)


class Poster(Protocol):
    """What a read needs of the agent that posted it."""

    def poll(self, handle: Any) -> bool: ...

    def forget(self, remote: Remote, read: NixlRead) -> None: ...
