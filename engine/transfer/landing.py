"""A read that may be given up while its bytes are still on the way."""

from collections.abc import Callable


class Landing:
    """One read into memory of this process. `stop` asks it to return early.

    A one-sided read cannot be called back: when `read` has returned or raised, bytes may still land until `is_over`.
    So long the memory must not be given to anybody else.
    """

    def __init__(self) -> None:
        self.is_stopped = False
        self._left: Callable[[], bool] | None = None

    def stop(self) -> None:
        """Nobody wants the bytes any more. From any thread."""
        self.is_stopped = True

    def leave(self, is_over: Callable[[], bool]) -> None:
        """The reader returns although bytes may land until `is_over()`."""
        self._left = is_over

    @property
    def is_over(self) -> bool:
        """No byte can land any more; asks the plane."""
        if self._left is not None and self._left():
            self._left = None
        return self._left is None
