"""Finds the end of a JSON object that comes in pieces, without parsing it."""


class JsonValue:
    """Counts braces outside of strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_complete = False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for number, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_complete = True
                    return number + 1
        return len(text)
