"""What a request forbids and demands of its output, made ready for workers: bad words as ids, checked grammars."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from pagewire.errors import InvalidArgument
from pagewire.sampling import StructuredOutput
from pagewire.text.tokenizer import Tokenizer

_INLINE_CHARS = 256
_MAX_KEPT = 256

if find_spec("llguidance") is None:  # said at the start, and not by the first request that needs it
    raise ModuleNotFoundError("No module named 'llguidance'", name="llguidance")


class ConstraintEncoder:
    """For one model. Slow work has a thread of its own, so that a hostile grammar holds up other grammars only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pagewire-grammar")
        self._checked: dict[StructuredOutput, None] = {}

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's token ids, with and without a space before it."""
        if sum(map(len, words)) <= _INLINE_CHARS:
            return self._bad_words(words)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._bad_words, words)

    async def check(self, structure: StructuredOutput) -> None:
        """Raises InvalidArgument for what is no grammar, or too large a one."""
        if structure in self._checked:
            return
        problem = await asyncio.get_running_loop().run_in_executor(self._executor, _problem_of, structure)
        if problem:
            raise InvalidArgument(f"sampling.structured_output.{structure.kind}", None, f"is refused: {problem}")
        if len(self._checked) >= _MAX_KEPT:
            self._checked.pop(next(iter(self._checked)))
        self._checked[structure] = None

    def close(self) -> None:
        """Ends the thread; what runs is finished first."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                if token_ids := tuple(self._tokenizer.encode(text, add_special_tokens=False)):
                    found[token_ids] = None
        return tuple(found)


def _problem_of(structure: StructuredOutput) -> str:
    """Why it is refused; empty if it is a grammar."""
    # Not imported by a router that nobody asks for one: 5 MB.
    from pagewire.grammar_text import GrammarError, check_structure

    try:
        check_structure(structure)
    except GrammarError as error:
        return str(error)
    return ""
