"""The help of a command, from its docstring."""

import inspect
from collections.abc import Callable


def help_of(command: Callable[..., int]) -> str:
    """Its docstring by paragraphs: typer keeps line breaks; the terminal's width should decide."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(p.split()) for p in paragraphs)
