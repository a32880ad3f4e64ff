"""A backend with the event loop that it lives on: opened together, closed together."""

import threading

from offline.generation import OfflineBackend
from offline.loop_thread import LoopThread


class Session:
    """Open from the start until `close`, which may be called from any thread but the backend's own."""

    def __init__(self, backend: OfflineBackend) -> None:
        """Raises what the backend's beginning raises; then nothing of it is left."""
        self._loop = LoopThread()
        self._backend: OfflineBackend | None = backend
        try:
            self._loop.run(backend.begin())
        except BaseException:
            self.close()
            raise

    @property
    def backend(self) -> OfflineBackend:
        """Raises RuntimeError when closed."""
        if self._backend is None:
            raise RuntimeError("the LLM is closed")
        return self._backend

    @property
    def loop(self) -> LoopThread:
        """Where the backend's coroutines run."""
        return self._loop

    def close(self) -> None:
        """Ends what runs, gives everything back."""
        backend, self._backend = self._backend, None
        if backend is not None:
            try:
                self._loop.run(backend.end())
            finally:
                self._loop.close()


def close_from_anywhere(session: Session) -> None:
    """For a finalizer: the collector may run it on one of the threads that `close` waits for."""
    if threading.current_thread().name.startswith(("pagewire-", "transfer")):
        threading.Thread(target=session.close, name="close-llm").start()
    else:
        session.close()
