"""Why an adapter is not served."""

from engine.errors import EngineError

_MAX_CHARS = 1000


class AdapterError(EngineError, ValueError):
    """The adapter can't be used here: names the file, the field or tensor, the value and what is allowed.

    Long messages lose their middle: paths and tensor names are others' text, and a status must fit its headers.
    """

    def __init__(self, message: str) -> None:
        half = _MAX_CHARS // 2
        super().__init__(message if len(message) <= _MAX_CHARS else f"{message[:half]} … {message[-half:]}")


class AdapterNotFound(AdapterError):
    """No adapter of this name (and content) is loaded."""


class AdapterLoadFailed(AdapterError):
    """It can't be copied to the device; `key` is the adapter's, whose requests can't run. Nothing else has changed."""

    def __init__(self, key: bytes, message: str) -> None:
        super().__init__(message)
        self.key = key


class AdapterOutdated(AdapterError):
    """A load that a later one has overtaken, or whose content is not the one that was checked."""


class AdapterLimit(AdapterError):
    """One more than may be held."""
