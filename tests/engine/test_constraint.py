"""What may follow drafts: guesses are read beside the output and never change what the output allows."""

from collections.abc import Sequence

import numpy as np
import pytest

from engine.constraint import Constraint
from engine.permitted_drafts import FORCED, PermittedDrafts
from engine.request import EngineRequest
from engine.sequence import Sequence as EngineSequence
from engine.speculation import Allowance
from pagewire.grammar import GrammarCompiler, GrammarError
from pagewire.sampling import SamplingParams, StructuredOutput
from pagewire.text.tokenizer import Tokenizer
from tests.tiny_tokenizers import EOS, byte_level

TOKENIZER = Tokenizer(byte_level())
VOCAB = TOKENIZER.num_tokens
COMPILER = GrammarCompiler(lambda: TOKENIZER, VOCAB, (EOS,))
FORM = StructuredOutput("regex", "x(abc|abd)+(zq){0,2}")


def ids(text: str) -> list[int]:
    """A token for each character, whatever the tokenizer would make of the text."""
    return [TOKENIZER.encode(character, add_special_tokens=False)[0] for character in text]


def request(structure: StructuredOutput = FORM, **params: object) -> EngineRequest:
    fields = {"structured_output": structure, "max_tokens": 50} | params
    return EngineRequest("r", (5,), SamplingParams(**fields), grammar=COMPILER.compile(structure))  # type: ignore[arg-type]


def test_guesses_are_taken_back() -> None:
    constraint = Constraint(request(), VOCAB)
    rng, output = np.random.default_rng(1), list[int]()
    guesses = ["xab", "xabc", "xabcz", "xabd", "abc", "cab", "z", "zqzq", "", "xabdabc"]
    while len(output) < 30:
        fresh = Constraint(request(), VOCAB)
        for guess in rng.choice(guesses, 3):
            drafts = ids(guess)
            num_permitted = constraint.num_permitted(output, drafts)
            for end in range(num_permitted + 1):
                known = [*output, *drafts[:end]]
                assert (
                    constraint.mask_of_guess(output, drafts[:end]) == Constraint(request(), VOCAB).mask(known)
                ).all()
                assert end == len(drafts) or (end < num_permitted) == fresh_mask(known)[drafts[end]]
        mask = constraint.mask(output)
        assert (mask == fresh.mask(output)).all()
        may_follow = [each for each in np.flatnonzero(mask) if each != EOS]
        if not may_follow:
            break
        output.append(int(rng.choice(may_follow)))
    assert len(output) > 5


def fresh_mask(known: Sequence[int]) -> np.ndarray:
    return Constraint(request(), VOCAB).mask(known)


def test_a_guess_that_breaks_a_grammar_breaks_nothing_else() -> None:
    constraint = Constraint(request(), VOCAB)
    with pytest.raises(GrammarError, match="left its grammar at token 1"):
        constraint.mask_of_guess(ids("x"), ids("z"))
    assert constraint.mask(ids("x"))[ids("a")[0]]
    assert constraint.num_permitted(ids("x"), ids("abq")) == 2


@pytest.mark.parametrize(
    ("output", "drafts", "num"),
    [((), (7, 8, 9), 3), ((), (7, 9), 1), ((5, 7), (9,), 0), ((5,), (7, 8, 7, 9), 3), ((5,), (3,), 0), ((), (4, 7), 0)],
)
def test_bad_words_and_allowed_tokens(output: tuple[int, ...], drafts: tuple[int, ...], num: int) -> None:
    """Words go across from the output into the drafts: "7 9" and "4" are bad ones."""
    params = SamplingParams(allowed_token_ids=(4, 5, 7, 8, 9), bad_words_token_ids=((7, 9), (4,)))
    constraint = Constraint(EngineRequest("r", (5,), params), 12)
    assert constraint.num_permitted(output, drafts) == num
    for end in range(len(drafts)):
        expected = constraint.mask([*output, *drafts[:end]])
        assert (constraint.mask_of_guess(output, drafts[:end]) == expected).all()
        assert end >= num or expected[drafts[end]]


class Fixed:
    """Always the same guess."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def propose(self, sequence: EngineSequence, allowance: Allowance) -> tuple[int, ...]:
        return tuple(self.token_ids[: allowance(3, 0)])


def test_drafts_are_what_is_forced_and_never_what_is_forbidden() -> None:
    asked: list[int] = []

    def allowance(kind: int, _: int) -> int:
        asked.append(kind)
        return 4

    def proposed(output: str, guess: str) -> tuple[int, ...]:
        asked.clear()
        own = request()
        sequence = EngineSequence(own, 1, 0, [5, *ids(output)], choices_to_sample=(0,))
        return PermittedDrafts(Fixed(ids(guess)), VOCAB).propose(sequence, allowance)

    forced = proposed("", "qqq")
    assert asked == [FORCED]
    text = b"".join(TOKENIZER.token_bytes(each) or b"" for each in forced)
    assert b"xab".startswith(text)
    assert len(text) >= 1
    assert proposed("xab", "cabd") == tuple(ids("cabd"))
    assert asked == [3]
    assert proposed("xab", "cabz") == tuple(ids("cab"))
    assert proposed("xab", "q") == ()
    assert proposed("nonsense", "q") == (), "the request will be told when it samples"
