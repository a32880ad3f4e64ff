"""One choice's output in any order of arrival, and the outbox that merges what a slow reader leaves."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.text.stop import StopMatcher
from pagewire.text.tokenizer import Tokenizer
from router.choice import ChoiceOutput
from router.generation import Generation
from router.request import FinishReason, Logprobs, Piece, Token
from tests.tiny_tokenizers import EOS, byte_level

TOKENIZER = Tokenizer(byte_level())
LETTER = {char: TOKENIZER.token_id(char) or 0 for char in "abcdefgSTOPxyz"}


def a_choice(
    *stops: str, number: int = 0, max_tokens: int = 100, include: bool = False, skip: bool = True, min_tokens: int = 0
) -> ChoiceOutput:
    detokenizer = TOKENIZER.detokenizer(skip_special_tokens=skip)
    stop = StopMatcher(stops, include_in_output=include)
    return ChoiceOutput(
        number, detokenizer, stop, max_tokens=max_tokens, min_tokens=min_tokens, show_stop_token=include
    )


def tokens(text: str, **last: FinishReason) -> list[Token]:
    made = [Token(0, index, LETTER[char]) for index, char in enumerate(text)]
    if last:
        made[-1] = Token(0, len(text) - 1, LETTER[text[-1]], None, last["finish"])
    return made


def join(pieces: list[Piece | None]) -> tuple[str, list[int], FinishReason | None, str]:
    present = [piece for piece in pieces if piece is not None]
    ids = [token_id for piece in present for token_id in piece.token_ids]
    indexes = [piece.index for piece in present]
    assert indexes == [sum(len(p.token_ids) for p in present[:i]) for i in range(len(present))], "gaps"
    last = present[-1]
    return "".join(piece.text for piece in present), ids, last.finish_reason, last.stop_reason


@given(st.permutations(list(range(8))), st.lists(st.integers(0, 7), max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_order_and_any_repetition_gives_the_same(order: list[int], again: list[int]) -> None:
    made = tokens("abcdefgS", finish=FinishReason.LENGTH)
    choice = a_choice()
    pieces = [choice.push(made[index]) for index in [*order[:4], *again, *order]]
    assert join(pieces) == ("abcdefgS", [LETTER[char] for char in "abcdefgS"], FinishReason.LENGTH, "")


def test_length_is_the_routers_when_the_worker_says_nothing() -> None:
    choice = a_choice(max_tokens=1)
    piece = choice.push(tokens("a")[0])
    assert piece is not None
    assert (piece.text, piece.finish_reason) == ("a", FinishReason.LENGTH)
    assert choice.push(Token(0, 1, LETTER["b"])) is None


def test_a_stop_string_wins_over_length() -> None:
    choice = a_choice("b", max_tokens=2)
    text, ids, finish, stop = join([choice.push(token) for token in tokens("ab")])
    assert (text, len(ids), finish, stop) == ("a", 2, FinishReason.STOP, "b")


def test_held_text_comes_out_when_the_choice_ends_otherwise() -> None:
    choice = a_choice("STOP", max_tokens=4)
    pieces = [choice.push(token) for token in tokens("aSTO")]
    assert [piece.text for piece in pieces if piece] == ["a", "", "", "STO"]


@pytest.mark.parametrize(
    ("include", "skip", "text"), [(False, True, "a"), (False, False, "a"), (True, True, "a"), (True, False, "a<eos>")]
)
def test_text_of_the_token_that_stopped_it(include: bool, skip: bool, text: str) -> None:
    choice = a_choice(include=include, skip=skip)
    pieces = [choice.push(tokens("a")[0]), choice.push(Token(0, 1, EOS, None, FinishReason.STOP))]
    assert join(pieces) == (text, [LETTER["a"], EOS], FinishReason.STOP, "")


def test_stop_token_id_that_is_text_is_hidden_too() -> None:
    choice = a_choice()
    assert join([choice.push(token) for token in tokens("abc", finish=FinishReason.STOP)])[0] == "ab"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    choice = a_choice("ab", min_tokens=2)
    text, _, finish, _ = join([choice.push(token) for token in tokens("ababx")])
    assert (text, finish) == ("ab", FinishReason.STOP)


def test_an_incomplete_character_is_flushed_with_the_last_token() -> None:
    choice = a_choice(max_tokens=2)
    ids = TOKENIZER.encode("한", add_special_tokens=False)
    pieces = [choice.push(Token(0, index, ids[index])) for index in range(2)]
    assert [piece.text for piece in pieces if piece] == ["", "\ufffd"]


def test_facts_are_not_contradicted_silently() -> None:
    choice = a_choice()
    choice.push(Token(0, 0, LETTER["a"]))
    assert choice.contradicts(Token(0, 0, LETTER["b"]))
    assert not choice.contradicts(Token(0, 0, LETTER["a"]))
    assert not choice.contradicts(Token(0, 1, LETTER["b"]))


def test_forgotten_early_tokens_come_again() -> None:
    choice = a_choice()
    assert choice.push(Token(0, 1, LETTER["x"])) is None
    choice.forget_early()
    first = choice.push(Token(0, 0, LETTER["a"]))
    assert first is not None
    assert first.token_ids == [LETTER["a"]]


# --- generation ---


async def test_outbox_merges_what_waits() -> None:
    generation = Generation([a_choice(number=0), a_choice(number=1)])
    for index, char in enumerate("abc"):
        for number in range(2):
            generation.accept(Token(number, index, LETTER[char], Logprobs(-1.0, 1)))
    pieces = await generation.take()
    assert [(piece.choice, piece.index, piece.text, len(piece.logprobs)) for piece in pieces] == [
        (0, 0, "abc", 3),
        (1, 0, "abc", 3),
    ]
    generation.accept(Token(1, 3, LETTER["d"]))
    (piece,) = await generation.take()
    assert (piece.choice, piece.index, piece.text) == (1, 3, "d")
    assert generation.num_completion_tokens == 7
    generation.close()
    assert await generation.take() == []


async def test_take_waits_for_output() -> None:
    generation = Generation([a_choice()])
    waiting = asyncio.create_task(generation.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    generation.accept(tokens("a")[0])
    assert [piece.text for piece in await waiting] == ["a"]


def test_finished_when_every_choice_is() -> None:
    finished: list[bool] = []
    generation = Generation([a_choice(number=0, max_tokens=1), a_choice(number=1, max_tokens=2)])
    generation.on_finished(lambda: finished.append(True))
    assert generation.so_far() == {}
    generation.accept(Token(0, 0, LETTER["a"]))
    assert not generation.is_finished
    states = generation.so_far()
    assert (states[0].finished, states[0].output_token_ids) == (True, (LETTER["a"],))
    assert (states[1].finished, states[1].output_token_ids) == (False, ())
    generation.accept(Token(1, 0, LETTER["a"]))
    generation.accept(Token(1, 1, LETTER["b"]))
    generation.accept(Token(7, 0, LETTER["b"]))
    assert finished == [True]
    assert generation.is_finished


def test_only_an_unfinished_choice_can_be_contradicted() -> None:
    generation = Generation([a_choice(number=0, max_tokens=1), a_choice(number=1)])
    for number in range(2):
        generation.accept(Token(number, 0, LETTER["a"]))
    assert not generation.contradicts(Token(0, 0, LETTER["b"]))
    assert generation.contradicts(Token(1, 0, LETTER["b"]))
    assert not generation.contradicts(Token(9, 0, LETTER["b"]))
