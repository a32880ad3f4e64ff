"""Runs a beam search: a request for every step, each with all beams as choices, and the best outputs at the end.

A step is a request like any other: it may migrate, its beams share the prompt's blocks and what else is cached.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from uuid import uuid4

from pagewire.errors import InvalidArgument
from pagewire.sampling import SamplingParams
from pagewire.text.detokenizer import Detokenizer
from pagewire.text.stop import StopMatcher
from pagewire.text.tokenizer import Tokenizer
from pagewire.wire import MAX_WORKER_LOGPROBS
from router.beams import BeamState, BeamText, Finished, num_candidates
from router.choice import ChoiceOutput
from router.failure import in_the_clients_words
from router.generation import Generation
from router.request import BeamSearch, FinishReason, Logprobs, Piece, TextOptions, Token, WorkerCall


class BeamRun:
    """`run` once, then `pieces`. `live` runs one worker call to its end."""

    def __init__(
        self,
        call: WorkerCall,
        search: BeamSearch,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
        options: TextOptions,
    ) -> None:
        """Raises InvalidArgument if a step would need more log-probabilities than workers give."""
        sampling = call.sampling
        eos = frozenset[int]() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._end_token_ids = eos | frozenset(sampling.stop_token_ids)
        if num_candidates(search.num_beams, len(self._end_token_ids)) > MAX_WORKER_LOGPROBS:
            limit = f"is too large for {len(self._end_token_ids)} end-of-sequence and stop tokens"
            raise InvalidArgument("beam_search.num_beams", search.num_beams, limit)
        self._call = call
        self._tokenizer = tokenizer
        self._options = options
        self._max_tokens = sampling.max_tokens or 1
        text = BeamText(self._detokenizer(), self._stop(), sampling.min_tokens) if options.stop else None
        self._state = BeamState(search, self._max_tokens, self._end_token_ids, text)

    async def run(self, live: Callable[[WorkerCall, Generation], Awaitable[None]]) -> None:
        """The first step has the prompt, and its log-probabilities if they are wanted. Raises what `live` raises."""
        given = self._call.sampling
        may_not_all_be_drawn = given.is_constrained or given.min_tokens > 0
        prompt_logprobs = given.prompt_logprobs
        while not self._state.is_done:
            generation = self._step(has_prompt_logprobs=prompt_logprobs is not None)
            num_tokens = len(self._state.beams[0].token_ids) + 1
            sampling = replace(
                given,
                n=len(self._state.beams),
                max_tokens=num_tokens,
                min_tokens=min(given.min_tokens, num_tokens),
                temperature=0.0,
                # Which beam ends is decided here. (Workers take no ignore_eos beside a form of the text.)
                ignore_eos=given.structured_output is None,
                logprobs=max(self._state.num_candidates, given.logprobs or 0),
                prompt_logprobs=prompt_logprobs,
                drawable_logprobs=may_not_all_be_drawn,
            )
            prompt_logprobs = None
            await live(replace(self._call, request_id=uuid4().hex, sampling=sampling), generation)
            pieces = {piece.choice: piece for piece in await generation.take()}
            self._state.advance([pieces[number].logprobs[-1].top for number in range(sampling.n)])
        if not self._state.finished:
            field, value = _narrowest(given)
            limit = f"leaves no beam a token to draw after {num_tokens - 1} tokens, and none has ended"
            raise in_the_clients_words(InvalidArgument(f"request.params.{field}", value, limit))

    def pieces(self, num_choices: int) -> list[Piece]:
        """The best outputs, best first."""
        return [self._piece(number, found) for number, found in enumerate(self._state.finished[:num_choices])]

    def _step(self, *, has_prompt_logprobs: bool) -> Generation:
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
            ],
            num_prompt_logprobs=len(self._call.prompt_token_ids) - 1 if has_prompt_logprobs else 0,
        )

    def _piece(self, number: int, found: Finished) -> Piece:
        shows_stop = self._options.include_stop_str_in_output
        output = ChoiceOutput(
            number,
            self._detokenizer(),
            self._stop(),
            max_tokens=self._max_tokens,
            min_tokens=self._call.sampling.min_tokens,
            show_stop_token=shows_stop,
        )
        whole = Piece(number, 0, beam_score=found.score)
        for index, token_id in enumerate(found.token_ids):
            finish = FinishReason.STOP if token_id in self._end_token_ids else None
            token = Token(number, index, token_id, self._logprobs(token_id, found, index), finish)
            if (piece := output.push(token)) is not None:
                whole.extend(piece)
        return whole

    def _logprobs(self, token_id: int, found: Finished, index: int) -> Logprobs | None:
        """The rank is that among the tokens that could be drawn."""
        wanted = self._call.sampling.logprobs
        if wanted is None:
            return None
        likeliest = found.likeliest[index]
        rank, logprob = next((rank, value) for rank, (other, value) in enumerate(likeliest, 1) if other == token_id)
        return Logprobs(logprob, rank, likeliest[:wanted])

    def _detokenizer(self) -> Detokenizer:
        return self._tokenizer.detokenizer(skip_special_tokens=self._options.skip_special_tokens)

    def _stop(self) -> StopMatcher:
        return StopMatcher(self._options.stop, include_in_output=self._options.include_stop_str_in_output)


def _narrowest(sampling: SamplingParams) -> tuple[str, object]:
    """The parameter that says what may be drawn, and its value."""
    if sampling.structured_output is not None:
        return f"structured_output.{sampling.structured_output.kind}", None
    if sampling.allowed_token_ids:
        return "allowed_token_ids", list(sampling.allowed_token_ids)
    return "bad_words", None
