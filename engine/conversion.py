"""What converting a model file says while it runs, and when it can't be done. Imports nothing: `pagewire up` asks first
whether there is anything to convert."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, in all); stages are "assemble", "tokenizer" and "weights" (in bytes)."""


class ConvertError(Exception):
    """A model file that can't be converted; the message names the file and the field or tensor."""
