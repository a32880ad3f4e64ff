"""Structured output: what an output may go on with, as a mask over the vocabulary. On `llguidance`, without torch.

A grammar's state is a function of the output's tokens alone: whoever continues an output replays them. The vocabulary's
bytes come from the model's own tokenizer, so that what the grammar reads is what the client will.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import llguidance
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from pagewire.grammar_text import LIMITS, GrammarError, check_structure, grammar_text, shorten
from pagewire.sampling import StructuredOutput
from pagewire.text.tokenizer import Tokenizer

__all__ = ["Grammar", "GrammarCompiler", "GrammarError", "GrammarState", "check_structure"]

_MAX_KEPT = 64


class GrammarState:
    """One output's place in its grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        self._num_facts = 0
        self._guesses: list[int] = []
        """What the matcher has read beyond the facts."""

    def allowed(self, output_token_ids: Sequence[int], guesses: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Which tokens may follow the output (that of the last call and any number more) and `guesses`: [vocab_size].

        Guesses are taken back by a later call that has others, or none. Raises GrammarError if the tokens left the
        grammar, or the next step is too complex; the latter for ever, even if guesses were to blame.
        """
        matcher = self._matcher
        self._read(output_token_ids, guesses)
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if matcher.is_error():
            raise GrammarError(_brief(matcher))
        bits = np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def num_allowed(self, output_token_ids: Sequence[int], guesses: Sequence[int]) -> int:
        """So many of the guesses, from the first on, may follow the output. Raises GrammarError as `allowed`."""
        self._read(output_token_ids, ())
        return self._matcher.validate_tokens(list(guesses))

    def forced(self, output_token_ids: Sequence[int]) -> list[int]:
        """Tokens of the text that must follow the output, as the tokenizer would cut it; often none.

        Other cuts of that text may be drawn as well. Raises GrammarError as `allowed`.
        """
        self._read(output_token_ids, ())
        return self._matcher.compute_ff_tokens()

    def _read(self, output_token_ids: Sequence[int], guesses: Sequence[int]) -> None:
        """Brings the matcher behind these tokens: takes back what it has read in vain, reads what is new."""
        new = [*output_token_ids[self._num_facts :], *guesses]
        num_kept = 0
        while num_kept < min(len(new), len(self._guesses)) and new[num_kept] == self._guesses[num_kept]:
            num_kept += 1
        num_in_vain = len(self._guesses) - num_kept
        if num_in_vain and not self._matcher.rollback(num_in_vain):
            raise GrammarError(f"it could not take back {num_in_vain} tokens: {_brief(self._matcher)}")
        num_read = num_kept
        if num_kept < len(new):
            num_read += self._matcher.try_consume_tokens(new[num_kept:])
        num_new_facts = len(output_token_ids) - self._num_facts
        self._guesses = new[:num_read][num_new_facts:]
        self._num_facts += min(num_read, num_new_facts)
        if num_read < len(new):
            at = len(output_token_ids) - num_new_facts + num_read
            raise GrammarError(f"the output left its grammar at token {at}: {_brief(self._matcher)}")


class Grammar:
    """A compiled grammar; each output starts a state of its own."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def start(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles for one model, and keeps the latest grammars. Slow calls, for any thread but the device's.

    `load_tokenizer` is called at the first grammar. End-of-sequence ids are what may follow a complete text.
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, structure: StructuredOutput) -> Grammar:
        """Raises GrammarError."""
        digest = hashlib.sha256(repr(structure).encode()).digest()
        with self._lock:
            kept = self._kept.get(digest)
            if kept is not None:
                self._kept.move_to_end(digest)
                return kept
            if self._tokenizer is None:
                self._tokenizer = self._vocabulary()
            matcher = LLMatcher(self._tokenizer, grammar_text(structure), log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise GrammarError(_brief(matcher))
            if matcher.is_stopped() and not matcher.is_accepting():
                raise GrammarError("no text satisfies it")
            # The first step of one that is too complex fails here, and not on the device's thread.
            GrammarState(matcher.deep_copy(), self._vocab_size).allowed(())
            grammar = self._kept[digest] = Grammar(matcher, self._vocab_size)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            return grammar

    def _vocabulary(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, so that no text could end")
        tokenizer = self._load_tokenizer()
        return LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)),
            eos_token=list(self._eos_token_ids),
        )


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_token_ids | set(eos_token_ids)
        self.special_token_ids = sorted(token_id for token_id in special if token_id < vocab_size)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        # Ids without a token stand for no bytes: they are never allowed.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False)


def _brief(matcher: LLMatcher) -> str:
    message = matcher.get_error() or str(matcher.stop_reason())
    return "no text satisfies it" if message.startswith("NoExtension") else shorten(message)
