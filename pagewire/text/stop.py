"""Stop strings: text is held back as long as it may still become one, and never longer."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass


@dataclass(slots=True)
class StopText:
    """Text that may go out, and the stop string that ended it, if one did. Not frozen: it is made for every token."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Watches one choice's text. The result does not depend on how the text was cut into pieces.

    The stop string that is complete first wins; of those that end at the same character, the longest.

        text so far   ...sent.....|.held.
                                   `-----' longest suffix that is a proper prefix of a stop string
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_in_output
        self._longest = max(map(len, self._stops), default=0)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def copy(self) -> "StopMatcher":
        """The same text so far, to go on in another way."""
        return copy(self)

    @property
    def held(self) -> str:
        """Text that waits for more."""
        return self._held

    def push(self, piece: str) -> StopText:
        """Takes new text. After a stop nothing more may be pushed."""
        if not self._held and self._first_characters.isdisjoint(piece):
            return StopText(piece)  # nothing begins here; nearly every token goes this way
        text = self._held + piece
        match = self._first_match(text, len(self._held))
        if match is not None:
            end, stop = match
            self._held = ""
            return StopText(text[: end if self._include else end - len(stop)], stop)
        keep = self._held_length(text)
        self._held = text[len(text) - keep :] if keep else ""
        return StopText(text[: len(text) - keep])

    def push_unchecked(self, piece: str) -> str:
        """Takes new text in which a stop string does not count (before min_tokens)."""
        text, self._held = self._held + piece, ""
        return text

    def flush(self) -> str:
        """The held text, when the choice ends for another reason."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """(end, stop) of the first complete stop string; it must end in the new text."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
        return best

    def _held_length(self, text: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                suffix = text[start:]
                if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stops):
                    return len(suffix)
        return 0
