"""Why the engine does not take a request, or does not start.

EngineError
├── ModelError (also a ValueError): the model directory can't be served
├── RequestRefused (also a ValueError): it can never run; names field, value and limit
├── EngineStopped: the loop has ended
└── EngineDied: the engine has lost what it can't compute without
"""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ModelError(EngineError, ValueError):
    """The model directory can't be served: names the file, the field or tensor, and the value."""


class RequestRefused(EngineError, ValueError):
    """The request can never run here. `field` is the request's field; `value` and `limit` are its numbers."""

    def __init__(self, field: str, description: str, *, value: int | str = "", limit: int | None = None) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description
        self.value = value
        self.limit = limit


class EngineStopped(EngineError):
    """The engine's loop does not run (any more)."""


class EngineDied(EngineError):
    """No step will ever work again: another process that computes a part of each is gone."""
