"""Prompts to token ids: the chat template, then the tokenizer; long texts in a thread, so that streams go on."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pagewire.errors import InvalidArgument
from pagewire.text.chat_template import ChatTemplateError
from pagewire.text.tokenizer import TooManyTokens
from pagewire.worker_view import AdapterLabel
from router.model import ModelFacts
from router.prompt_keys import KeySpace, PromptKeys
from router.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.validate import message_fields, template_variables, too_long, tools_of

# Measured here: 1 … 7 µs a character. Shorter texts are done before a thread would have woken up.
_INLINE_CHARS = 256
_INLINE_IDS = 4096
_INLINE_KEYS_TOKENS = 1024


class PromptEncoder:
    """Renders and tokenizes for one model. Prompts must be validated."""

    def __init__(self, model: ModelFacts, *, num_threads: int = 2) -> None:
        self._model = model
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="pagewire-tokenize")

    async def encode(self, prompt: Prompt, *, max_tokens: int | None = None) -> tuple[int, ...]:
        """Token ids. Raises InvalidArgument if the template refuses the messages or the prompt is too long."""
        try:
            if isinstance(prompt, TokenPrompt):
                return prompt.token_ids
            if isinstance(prompt, TextPrompt) and len(prompt.text) <= _INLINE_CHARS:
                return self._encode_now(prompt, max_tokens)
            # Templates run in a thread always: how long one takes is not for us to say.
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, self._encode_now, prompt, max_tokens)
        except TooManyTokens as error:
            field = "text" if isinstance(prompt, TextPrompt) else "chat.messages"
            raise too_long(field, error.num_tokens, error.limit + 1, is_exact=error.is_exact) from None

    async def keys(
        self,
        token_ids: Sequence[int],
        cache_salt: str,
        spaces: Sequence[KeySpace],
        adapter: AdapterLabel | None = None,
    ) -> PromptKeys:
        """The prompt's block keys, for these key spaces already hashed."""
        keys = PromptKeys(token_ids, cache_salt, adapter)
        if keys.num_unprepared_tokens(spaces) <= _INLINE_KEYS_TOKENS:
            keys.prepare(spaces)
        else:
            await asyncio.get_running_loop().run_in_executor(self._executor, keys.prepare, spaces)
        return keys

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids that begin a text."""
        decode = partial(self._model.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        if len(token_ids) <= _INLINE_IDS:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self._executor, decode)

    def close(self) -> None:
        """Ends the threads; what runs is finished first."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _encode_now(self, prompt: TextPrompt | ChatPrompt, max_tokens: int | None) -> tuple[int, ...]:
        tokenizer = self._model.tokenizer
        if isinstance(prompt, TextPrompt):
            special = prompt.add_special_tokens
            return tuple(tokenizer.encode(prompt.text, add_special_tokens=special, max_tokens=max_tokens))
        template = tokenizer.chat_template
        if template is None:
            raise InvalidArgument("chat", None, f"model {self._model.name!r} has no chat template; use text or tokens")
        fields = message_fields(prompt)
        messages = [
            {"role": role, "content": content, **more}
            for (role, content), more in zip(prompt.messages, fields, strict=True)
        ]
        try:
            text = template.render(
                messages,
                add_generation_prompt=prompt.add_generation_prompt,
                variables=template_variables(prompt) | ({"tools": tools} if (tools := tools_of(prompt)) else {}),
            )
        except ChatTemplateError as error:
            raise InvalidArgument("chat.messages", None, str(error)) from error
        # The template writes the special tokens itself.
        return tuple(tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens))
