"""`LLM`: a model for scripts and notebooks, in vLLM's shape. An engine in this process, or a running system.

caller's thread   generate, chat ──► LoopThread.run ──► wait (Ctrl-C cancels)
event loop        prompts → token ids, checks, text; a bounded number of requests in flight
device thread     the engine (none with `target`)
"""

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from offline.generation import OfflineBackend, answer_all
from offline.outputs import RequestOutput
from offline.params import call_of
from offline.prompts import Message, PromptLike, conversations_of, prompts_of
from offline.remote import RemoteBackend
from offline.session import Session, close_from_anywhere
from pagewire.config import engine_options
from pagewire.errors import InvalidArgument
from pagewire.sampling import SamplingParams
from pagewire.text.tokenizer import Tokenizer
from pagewire.token_progress import token_progress
from router.request import Prompt, TextPrompt


class LLM:
    """A model. Close it, or use it in a `with`; threads may share it."""

    def __init__(
        self,
        model: str | os.PathLike[str] = "",
        *,
        target: str = "",
        seed: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        max_concurrent_requests: int = 64,
        tls: bool = False,
        tls_ca: bytes | None = None,
        tls_cert: bytes | None = None,
        tls_key: bytes | None = None,
        token: str | None = None,
        **options: Any,
    ) -> None:
        """Loads `model`, or connects to the router at `target` ("host:port"); exactly one must be given.

        `model` is a directory, "demo", a name on the Hugging Face hub or a GGUF file; `options` are the engine's
        (pagewire/engine_options.py: dtype, kernels, max_model_len, …). With a `target`, `tokenizer` is a model
        directory that makes log-probabilities show text, at most `max_concurrent_requests` run at a time, and the rest
        is as for `Client`. With a `seed` all calls can be repeated: requests without a seed get one derived from it
        and their number. Raises ConfigError, EngineError, ModelError, PagewireError.
        """
        self._seed = _checked_seed(seed)
        self._num_requests = 0
        self._lock = threading.Lock()
        security: dict[str, Any] = {
            "tls": tls,
            "tls_ca": tls_ca,
            "tls_cert": tls_cert,
            "tls_key": tls_key,
            "token": token,
        }
        if bool(model) == bool(target):
            raise InvalidArgument("model, target", (model, target), "exactly one of the two must be given")
        if target:
            if options:
                raise InvalidArgument(
                    min(options), options[min(options)], "is an engine's option; a target has its own"
                )
            if max_concurrent_requests < 1:
                raise InvalidArgument("max_concurrent_requests", max_concurrent_requests, "must be at least 1")
            own = None if tokenizer is None else Tokenizer.load(Path(tokenizer))
            backend: OfflineBackend = RemoteBackend(
                target, tokenizer=own, num_in_flight=max_concurrent_requests, **security
            )
        else:
            unwanted = {name: value for name, value in {**security, "tokenizer": tokenizer}.items() if value}
            if unwanted:
                raise InvalidArgument(min(unwanted), unwanted[min(unwanted)], "is only for a target")
            backend = _load(os.fspath(model), options)
        self._session = Session(backend)
        self._finalizer = weakref.finalize(self, close_from_anywhere, self._session)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Continues each prompt; outputs in their order.

        A prompt is a text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, maybe with "cache_salt".
        `sampling_params` are for all, or one for each; `priority` is one for each, lower runs first. `adapter`
        is the name of a LoRA adapter for all, or one for each, "" for the base model. `use_tqdm` draws progress when
        somebody can see it. Raises PagewireError (InvalidArgument names prompt, field, value and limit, before anything
        runs); one failure ends the whole call. Ctrl-C ends it too, within 10 s, and the LLM stays usable.
        """
        return self._answer(prompts_of(prompts), sampling_params, use_tqdm, priority, adapter)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answers a conversation ({"role": …, "content": …}, …), or each of several; otherwise as `generate`."""
        conversations = conversations_of(messages, add_generation_prompt, chat_template_kwargs)
        return self._answer([(prompt, "") for prompt in conversations], sampling_params, use_tqdm, None, adapter)

    def get_tokenizer(self) -> "Tokenizer | RemoteTokenizer":
        """`encode` and `decode` of the model's own tokenizer."""
        return self._session.backend.tokenizer or RemoteTokenizer(self._session)

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self._session.backend.max_model_len

    def close(self) -> None:
        """Ends what runs, all threads, and gives the memory back. More calls are fine."""
        if self._finalizer.detach() is not None:
            self._session.close()

    def _answer(
        self,
        prompts: Sequence[tuple[Prompt, str]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        adapter: str | Sequence[str],
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [SamplingParams() if params is None else params] * len(prompts)
        adapters = [adapter] * len(prompts) if isinstance(adapter, str) else adapter
        for name, given in (("sampling_params", params), ("priority", priority), ("adapter", adapters)):
            if given is not None and len(given) != len(prompts):
                raise InvalidArgument(name, len(given), f"must be one for each of the {len(prompts)} prompts")
        with self._lock:
            first, self._num_requests = self._num_requests, self._num_requests + len(prompts)
        calls = [
            call_of(
                prompt,
                own,
                seed=self._seed_of(first + number),
                cache_salt=cache_salt,
                priority=0 if priority is None else priority[number],
                name=str(first + number),
                model=adapters[number],
            )
            for number, ((prompt, cache_salt), own) in enumerate(zip(prompts, params, strict=True))
        ]
        session = self._session
        with token_progress(len(calls), shown=use_tqdm) as progress:
            return session.loop.run(answer_all(session.backend, calls, progress))

    def _seed_of(self, number: int) -> int | None:
        return None if self._seed is None else xxhash.xxh3_64_intdigest(f"{self._seed}/{number}".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class RemoteTokenizer:
    """The tokenizer of a running system."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        backend = self._session.backend
        return list(self._session.loop.run(backend.tokenize(TextPrompt(text, add_special_tokens))))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids of a text from its start."""
        backend = self._session.backend
        return self._session.loop.run(backend.detokenize(token_ids, skip_special_tokens=skip_special_tokens))


def _checked_seed(seed: int | None) -> int | None:
    if seed is not None and not 0 <= seed < 2**64:
        raise InvalidArgument("seed", seed, "must be in 0 … 2**64-1")
    return seed


def _load(model: str, options: Mapping[str, Any]) -> OfflineBackend:
    """Only here is the engine imported, and torch with it: a target needs neither."""
    from offline.local import LocalBackend
    from offline.model_source import with_directory

    return LocalBackend.load(with_directory(engine_options(model=model, **options)))
