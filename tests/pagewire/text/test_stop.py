"""Stop strings: found wherever the tokens cut them, held back exactly as long as needed."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.text.stop import StopMatcher

SMALL = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character, the definition: the first character that completes a stop string ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    text = ""
    for piece in pieces:
        result = matcher.push(piece)
        text += result.text
        if result.stop is not None:
            return text, result.stop
    return text + matcher.flush(), None


@given(text=SMALL, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 30), max_size=12))
@settings(max_examples=500, deadline=None)
def test_result_does_not_depend_on_the_cuts(text: str, stops: list[str], include: bool, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(StopMatcher(stops, include_in_output=include), pieces) == expected(text, stops, include)


@given(text=SMALL, stops=STOPS)
@settings(max_examples=500, deadline=None)
def test_holds_back_the_longest_possible_beginning_and_no_more(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for number, char in enumerate(text, start=1):
        result = matcher.push(char)
        if result.stop is not None:
            return
        sent += result.text
        begun = [
            k
            for k in range(1, number + 1)
            if any(s != text[number - k : number] and s.startswith(text[number - k : number]) for s in stops)
        ]
        assert matcher.held == (text[number - max(begun) : number] if begun else "")
        assert sent + matcher.held == text[:number]


def test_stop_string_over_many_tokens_leaks_nothing() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(char).text for char in "ABCDEFGHI"] == ["A", "B", "C", "", "", "", "", "", ""]
    result = matcher.push("JK")
    assert (result.text, result.stop) == ("", "DEFGHIJ")


@pytest.mark.parametrize(("include", "text"), [(True, "ab<|"), (False, "ab")])
def test_include_stop_string(include: bool, text: str) -> None:
    matcher = StopMatcher(["<|"], include_in_output=include)
    assert matcher.push("ab<|cd").text == text


def test_a_stop_string_before_min_tokens_is_text() -> None:
    matcher = StopMatcher(["xyz"])
    assert matcher.push_unchecked("axy") == "axy"
    assert matcher.push("z").stop is None
    assert matcher.push("xyz").stop == "xyz"


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything").text == "anything"
    assert matcher.flush() == ""
