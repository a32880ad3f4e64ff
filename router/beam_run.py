"""Runs a beam search: a request for every step, each with all beams as choices, and the best outputs at the end.

A step is a request like any other: it may migrate, its beams share the prompt's blocks and what else is cached.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from uuid import uuid4

from pagewire.errors import InvalidArgument
from pagewire.text.stop import StopMatcher
from pagewire.text.tokenizer import Tokenizer
from pagewire.wire import MAX_WORKER_LOGPROBS
from router.beams import BeamState, Finished, num_candidates
from router.choice import ChoiceOutput
from router.generation import Generation
from router.request import BeamSearch, FinishReason, Piece, Token, WorkerCall


class BeamRun:
    """`run` once, then `pieces`. `live` runs one worker call to its end."""

    def __init__(
        self,
        call: WorkerCall,
        search: BeamSearch,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
        *,
        skip_special_tokens: bool,
    ) -> None:
        """Raises InvalidArgument if a step would need more log-probabilities than workers give."""
        if num_candidates(search.num_beams, len(eos_token_ids)) > MAX_WORKER_LOGPROBS:
            limit = f"is too large for a model with {len(eos_token_ids)} end-of-sequence tokens"
            raise InvalidArgument("beam_search.num_beams", search.num_beams, limit)
        self._call = call
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._eos_token_ids = frozenset() if call.sampling.ignore_eos else frozenset(eos_token_ids)
        self._max_tokens = call.sampling.max_tokens or 1
        self._state = BeamState(search, self._max_tokens, self._eos_token_ids)

    async def run(self, live: Callable[[WorkerCall, Generation], Awaitable[None]]) -> None:
        """Raises what `live` raises."""
        while not self._state.is_done:
            generation = self._step()
            num_tokens = len(self._state.beams[0].token_ids) + 1
            sampling = replace(
                self._call.sampling,
                n=len(self._state.beams),
                max_tokens=num_tokens,
                temperature=0.0,
                ignore_eos=True,
                logprobs=self._state.num_candidates,
            )
            await live(replace(self._call, request_id=uuid4().hex, sampling=sampling), generation)
            pieces = {piece.choice: piece for piece in await generation.take()}
            self._state.advance([pieces[number].logprobs[-1].top for number in range(sampling.n)])

    def pieces(self, num_choices: int) -> list[Piece]:
        """The best outputs, best first."""
        return [self._piece(number, found) for number, found in enumerate(self._state.finished[:num_choices])]

    def _step(self) -> Generation:
        """Takes one more token of each beam."""
        return Generation(
            [
                ChoiceOutput(
                    number,
                    self._tokenizer.detokenizer(skip_special_tokens=True),
                    StopMatcher(()),
                    max_tokens=len(beam.token_ids) + 1,
                    output_token_ids=beam.token_ids,
                )
                for number, beam in enumerate(self._state.beams)
            ]
        )

    def _piece(self, number: int, found: Finished) -> Piece:
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=self._skip_special_tokens)
        output = ChoiceOutput(number, detokenizer, StopMatcher(()), max_tokens=self._max_tokens)
        whole = Piece(number, 0, beam_score=found.score)
        for index, token_id in enumerate(found.token_ids):
            finish = FinishReason.STOP if token_id in self._eos_token_ids else None
            if (piece := output.push(Token(number, index, token_id, finish_reason=finish))) is not None:
                whole.extend(piece)
        return whole
