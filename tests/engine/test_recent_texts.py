"""Drafts from other requests' texts: the automaton finds what a search finds, and an owner finds only its own."""

from random import Random

import pytest

from engine.recent_texts import SEPARATOR, RecentTexts, SuffixAutomaton
from engine.request import EngineRequest
from engine.sequence import Sequence
from engine.suffix_proposer import RECENT, SuffixProposer
from pagewire.sampling import SamplingParams


def longest_suffix(text: list[int], of: list[int]) -> int:
    return next(
        length
        for length in range(len(of), -1, -1)
        if not length or any(text[at : at + length] == of[-length:] for at in range(len(text) - length + 1))
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_automaton_finds_the_longest_suffix_while_it_grows(seed: int) -> None:
    rng, automaton = Random(seed), SuffixAutomaton()
    alphabet, read, state, length = rng.choice([2, 3, 9]), list[int](), 0, 0
    for _ in range(150):
        for _ in range(rng.choice([0, 0, 1, 4])):
            automaton.push(SEPARATOR if rng.random() < 0.1 else rng.randrange(alphabet))
        read.append(rng.randrange(alphabet))
        state, length = automaton.walk(state, length, read[-1])
        # It may have missed what came after an earlier token was walked: no longer than a search, never wrong.
        assert length <= longest_suffix(automaton.tokens, read)
        state, length = 0, 0
        for token_id in read[-20:]:
            state, length = automaton.walk(state, length, token_id)
        assert length == longest_suffix(automaton.tokens, read[-20:])
        suffix, following = read[len(read) - length :], automaton.following(state, 3)
        assert SEPARATOR not in following
        if length and following:
            whole = [*suffix, *following]
            assert any(automaton.tokens[at : at + len(whole)] == whole for at in range(len(automaton.tokens)))


def sequence(prompt: list[int], output: list[int], **owner: str) -> Sequence:
    request = EngineRequest("r", tuple(prompt), SamplingParams(), **owner)  # type: ignore[arg-type]
    return Sequence(request, 1, 0, [*prompt, *output], choices_to_sample=(0,))


def test_what_others_were_answered_is_for_the_same_owner_alone() -> None:
    proposer, kinds = SuffixProposer(2, RecentTexts(1000)), []

    def propose(seq: Sequence) -> tuple[int, ...]:
        kinds.clear()
        return proposer.propose(seq, lambda kind, _: kinds.append(kind) or 4)  # type: ignore[func-returns-value]

    assert propose(sequence([1], [5, 6])) == ()
    proposer.ended(sequence([1, 2], [5, 6, 7, 8, 9, 10], cache_salt="a", tenant="t"))
    for owner in ({}, {"cache_salt": "b", "tenant": "t"}, {"cache_salt": "a"}, {"tenant": "t"}):
        assert propose(sequence([1], [5, 6], **owner)) == ()
    mine = {"cache_salt": "a", "tenant": "t"}
    assert propose(sequence([1, 2], [], **mine)) == (), "prompts are not kept"
    assert propose(sequence([1], [5, 6, 7], **mine)) == (8, 9, 10)
    assert kinds == [RECENT + 3]
    assert propose(sequence([6, 7, 30, 6, 7], [], **mine)) == (30, 6, 7, 30), "of equals the own text's"
    assert kinds == [2]
    growing = sequence([1], [5], **mine)
    assert propose(growing) == ()
    growing.token_ids.append(6)
    assert propose(growing) == (7, 8, 9, 10)
    proposer.ended(growing)
    assert growing not in proposer._cursors


def test_texts_are_bounded_and_the_latest_stay() -> None:
    recent = RecentTexts(64)
    for number in range(40):
        recent.note(number % 3, [number] * 9)
        assert recent.num_tokens <= 64 + 10
    latest = recent.of(39 % 3)
    assert latest is not None
    assert latest.walk(0, 0, 39)[1] == 1
    for owner in range(30):
        recent.note(f"other {owner}", [1, 2, 3])
    assert recent.of(0) is None
    recent.note("long", list(range(500)))
    assert recent.num_tokens <= 64


def test_a_long_shortest_match_can_be_found() -> None:
    proposer, output = SuffixProposer(20, RecentTexts(1000)), list(range(100, 140))
    proposer.ended(sequence([1], output))
    assert proposer.propose(sequence([1], output[:19]), lambda *_: 2) == ()
    assert proposer.propose(sequence([1], output[:20]), lambda *_: 2) == (120, 121)
    assert proposer.propose(sequence([1], [*output[:25], 7, *output[:21]]), lambda *_: 2) == (121, 122)


def test_no_sequence_keeps_texts_that_are_forgotten() -> None:
    recent = RecentTexts(64)
    proposer, reading = SuffixProposer(2, recent), sequence([1], [5, 6])
    proposer.ended(sequence([1], [5, 6, 7]))
    assert proposer.propose(reading, lambda *_: 1) == (7,)
    for owner in range(20):
        recent.note(owner, [1, 2, 3, 4])
    assert proposer.propose(reading, lambda *_: 1) == ()
    assert proposer._cursors == {}
