"""Stop strings at a worker's facade. Its engine knows no text, so the tokenizer is loaded when the first one comes."""

import asyncio
from pathlib import Path

from pagewire.errors import FailedPrecondition
from pagewire.text.detokenizer import Detokenizer
from pagewire.text.stop import StopMatcher
from pagewire.text.tokenizer import Tokenizer, TokenizerError
from pagewire.vllm_engine.call import Call


class StopStrings:
    """What one call wants to be stopped by, watched for each of its choices."""

    def __init__(self, call: Call, tokenizer: Tokenizer) -> None:
        self._min_tokens = call.sampling.min_tokens
        choices = range(call.sampling.n)
        self._detokenizers: list[Detokenizer] = [tokenizer.detokenizer() for _ in choices]
        self._matchers = [StopMatcher(call.stop) for _ in choices]
        self._counts = [0 for _ in choices]

    def push(self, choice: int, token_id: int) -> str:
        """The stop string that this token completes, or nothing. The first `min_tokens` tokens complete none."""
        self._counts[choice] += 1
        text = self._detokenizers[choice].push(token_id)
        if self._counts[choice] <= self._min_tokens:
            self._matchers[choice].push_unchecked(text)
            return ""
        return self._matchers[choice].push(text).stop or ""


class StopStringsSource:
    """Makes them for one model."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer: Tokenizer | None = None

    async def watch(self, call: Call) -> StopStrings | None:
        """None if the call has no stop strings."""
        if not call.stop:
            return None
        if self._tokenizer is None:
            try:
                self._tokenizer = await asyncio.to_thread(Tokenizer.load, self._directory)
            except TokenizerError as error:
                raise FailedPrecondition(f"stop strings need the model's tokenizer: {error}") from None
        return StopStrings(call, self._tokenizer)
