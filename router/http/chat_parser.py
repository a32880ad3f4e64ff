"""Splits a chat's output, as it comes, into reasoning, content and tool calls. Pure.

What cannot be told yet (half a tag, a call without its name) is held back. A call that turns out to be none is content:
nothing that the model wrote gets lost.
"""

import json
import re
from dataclasses import dataclass, field

from router.http.json_value import JsonValue
from router.http.tool_formats import CLOSE, END_THINK, MISTRAL_TAG, OPEN, PYTHON_TAG, THINK, ToolFormat

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD = 512


@dataclass(slots=True)
class CallDelta:
    """New text of one call's arguments; `name` only with a call's first delta."""

    index: int
    arguments: str = ""
    name: str | None = None


@dataclass(slots=True)
class Delta:
    """What a piece of text adds."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.reasoning or self.content or self.calls)


class ChatParser:
    """Of one choice. `style` None leaves tool calls in the content, `reasoning` False the thoughts.

    With `in_thought` the prompt has opened a thought already.
    """

    def __init__(self, style: ToolFormat | None, *, reasoning: bool, in_thought: bool = False) -> None:
        self.num_calls = 0
        self._style = style
        self._buffer = ""
        self._state = self._before_thoughts if reasoning else self._first_state
        self._value: JsonValue | None = None
        self._raw = ""  # of the call being read, should it turn out to be none
        self._is_last = False
        self._skips_space = False
        if reasoning and in_thought:
            self._state, self._skips_space = self._thoughts, True

    def push(self, text: str) -> Delta:
        """Takes new text."""
        delta = Delta()
        self._buffer += text
        while self._state(delta):
            pass
        return delta

    def finish(self) -> Delta:
        """The output has ended: what was held back goes out."""
        self._is_last = True
        delta = self.push("")
        if self._state == self._thoughts:
            delta.reasoning += self._without_space(self._buffer)
        elif self._value is None:  # an unfinished call's arguments have gone out already
            delta.content += self._without_space(self._raw + self._buffer)
        self._buffer = self._raw = ""
        return delta

    # Each state takes what it can from the buffer; True: there may be more to do in the next.

    def _before_thoughts(self, delta: Delta) -> bool:
        text = self._buffer.lstrip()
        if THINK.startswith(text) and not self._is_last:
            return False
        if text.startswith(THINK):
            self._buffer = text[len(THINK) :]
            self._skips_space = True
            self._state = self._thoughts
        else:
            self._state = self._first_state
        return True

    def _thoughts(self, delta: Delta) -> bool:
        before, found, self._buffer = _split(self._buffer, END_THINK)
        delta.reasoning += self._without_space(before)
        if found:
            self._skips_space = True
            self._state = self._first_state
        return found

    def _first_state(self, delta: Delta) -> bool:
        if self._style is None:
            return self._plain(delta)
        if self._style == "llama3":
            return self._maybe_llama_call(delta)
        tag = OPEN if self._style == "hermes" else MISTRAL_TAG
        before, found, self._buffer = _split(self._buffer, tag)
        delta.content += self._without_space(before)
        if found:
            self._raw = tag
            self._state = self._head if self._style == "hermes" else self._list
        return found

    def _maybe_llama_call(self, delta: Delta) -> bool:
        text = self._buffer.lstrip("; \n" if self.num_calls else " \n")
        if not self._is_last and (not text or (PYTHON_TAG.startswith(text) and text != PYTHON_TAG)):
            return False
        text = text.removeprefix(PYTHON_TAG)
        if text.startswith("{"):
            self._buffer, self._raw, self._state = text, "", self._head
            return True
        if self._is_last or text:
            self._state = self._plain
            return True
        return False

    def _without_space(self, text: str) -> str:
        """The text, without the space that follows a tag."""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text

    def _plain(self, delta: Delta) -> bool:
        delta.content += self._without_space(self._buffer)
        self._buffer = ""
        return False

    def _head(self, delta: Delta) -> bool:
        """Until the function's name and the beginning of its arguments."""
        match = _HEAD.match(self._buffer)
        if match is not None:
            name = json.loads(match[1])
            self._raw += self._buffer[: match.end()]
            self._buffer = self._buffer[match.end() :]
            delta.calls.append(CallDelta(self.num_calls, name=name))
            self.num_calls += 1
            self._value = JsonValue()
            self._state = self._arguments
            return True
        whole, is_complete = self._buffer, self._is_last
        if self._style == "hermes":
            end = self._buffer.find(CLOSE)
            if end >= 0:
                whole, is_complete = self._buffer[:end], True
        elif len(self._buffer) > _MAX_HEAD:
            is_complete = True
        if not is_complete:
            return False
        return self._unusual(whole, delta)

    def _unusual(self, whole: str, delta: Delta) -> bool:
        """A call whose fields come in another order, or none at all."""
        call = _call_of(_loads(whole))
        rest = self._buffer[len(whole) :]
        if call is None:
            delta.content += self._raw + whole
            self._raw = ""
            if self._style == "hermes" and rest.startswith(CLOSE):
                delta.content += CLOSE
                rest = rest[len(CLOSE) :]
        else:
            delta.calls.append(CallDelta(self.num_calls, call[1], call[0]))
            self.num_calls += 1
            self._skips_space = True
            rest = rest.removeprefix(CLOSE)
        self._buffer, self._raw = rest, ""
        self._state = self._plain if call is None and self._style == "llama3" else self._first_state
        return bool(rest)

    def _arguments(self, delta: Delta) -> bool:
        assert self._value is not None
        taken = self._value.take(self._buffer)
        if taken:
            delta.calls.append(CallDelta(self.num_calls - 1, self._buffer[:taken]))
            self._buffer = self._buffer[taken:]
        if not self._value.is_complete:
            return False
        self._state = self._tail
        return True

    def _tail(self, delta: Delta) -> bool:
        """The call's closing brace and tag."""
        end = CLOSE if self._style == "hermes" else "}"
        before, found, self._buffer = _split(self._buffer, end)
        if not found:
            self._buffer = before + self._buffer
            if self._is_last:
                self._buffer = ""
            return False
        self._value, self._raw, self._skips_space = None, "", True
        self._state = self._first_state
        return True

    def _list(self, delta: Delta) -> bool:
        """Mistral's list of calls, read when it is whole."""
        if not self._is_last:
            return False
        calls = _loads(self._buffer)
        found = [_call_of(call) for call in calls] if isinstance(calls, list) and calls else [None]
        if None in found:
            self._state = self._plain
            delta.content += self._raw
            self._raw = ""
            return True
        for call in found:
            assert call is not None
            delta.calls.append(CallDelta(self.num_calls, call[1], call[0]))
            self.num_calls += 1
        self._buffer = self._raw = ""
        return False


def _split(text: str, tag: str) -> tuple[str, bool, str]:
    """(before the tag, True, after it), or (what cannot belong to it, False, what may yet become it)."""
    before, found, after = text.partition(tag)
    if found:
        return before, True, after
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return text[:-length], False, text[-length:]
    return text, False, ""


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_of(value: object) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a call, if it is one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)
