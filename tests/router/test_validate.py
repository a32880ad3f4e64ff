"""Every bad input by its exact code and message."""

import math
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from pagewire.errors import InvalidArgument, NotFound, PagewireError
from pagewire.sampling import SamplingParams
from router.model import ModelError, ModelFacts
from router.request import ChatPrompt, GenerateCall, TextOptions, TextPrompt, TokenPrompt
from router.validate import MAX_TEXT_BYTES, resolve_max_tokens, template_variables, validate_call
from tests.tiny_tokenizers import byte_level, write_model_directory

GOOD = GenerateCall(TokenPrompt((1, 2)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return ModelFacts.load(write_model_directory(tmp_path_factory.mktemp("m") / "tiny", byte_level(), vocab_size=300))


def sampling(**values: object) -> GenerateCall:
    return replace(GOOD, sampling=SamplingParams(**values))  # type: ignore[arg-type]


def options(**values: object) -> GenerateCall:
    return replace(GOOD, text_options=TextOptions(**values))  # type: ignore[arg-type]


def chat(*messages: tuple[str, str], kwargs: str = "") -> GenerateCall:
    return replace(GOOD, prompt=ChatPrompt(messages, template_kwargs_json=kwargs))


BAD = [
    (replace(GOOD, prompt=None), "prompt", "prompt: is missing: set one of text, chat, tokens"),
    (replace(GOOD, prompt=TextPrompt("")), "text", "text = '': must not be empty"),
    (
        replace(GOOD, prompt=TextPrompt("é" * (MAX_TEXT_BYTES // 2) + "x")),
        "text",
        "text: has 4194305 bytes, must be at most 4194304",
    ),
    (
        replace(GOOD, prompt=TokenPrompt(())),
        "tokens.token_ids",
        "tokens.token_ids: must have at least one token id",
    ),
    (
        replace(GOOD, prompt=TokenPrompt((1, 300))),
        "tokens.token_ids[1]",
        "tokens.token_ids[1] = 300: must be below the vocabulary size of 300",
    ),
    (
        replace(GOOD, prompt=TokenPrompt((1,) * 128)),
        "tokens.token_ids",
        "tokens.token_ids: the prompt has 128 tokens, at most 127 fit: the context length is 128 and one is for the "
        "output",
    ),
    (chat(), "chat.messages", "chat.messages: must have at least one message"),
    (chat(("", "x")), "chat.messages[0].role", "chat.messages[0].role = '': must have 1 … 64 characters"),
    (
        chat(("user", "x"), kwargs="[1]"),
        "chat.template_kwargs_json",
        "chat.template_kwargs_json = '[1]': must be a JSON object",
    ),
    (
        chat(("user", "x"), kwargs="{"),
        "chat.template_kwargs_json",
        "chat.template_kwargs_json = '{': must be a JSON object",
    ),
    (
        chat(("user", "x"), kwargs='{"messages": []}'),
        "chat.template_kwargs_json",
        "chat.template_kwargs_json = 'messages': is set by the router and cannot be given",
    ),
    (options(stop=("x",) * 17), "text_options.stop", "text_options.stop = 17: must be at most 16 strings"),
    (
        options(stop=("a", "")),
        "text_options.stop[1]",
        "text_options.stop[1]: has 0 characters, must have 1 … 256",
    ),
    (
        replace(GOOD, priority=2**31),
        "priority",
        "priority = 2147483648: must be in -2147483648 … 2147483647",
    ),
    (
        replace(GOOD, priority=-(2**31) - 1),
        "priority",
        "priority = -2147483649: must be in -2147483648 … 2147483647",
    ),
    (
        replace(GOOD, cache_salt="\ud800"),
        "cache_salt",
        "cache_salt: must be Unicode text; it has a lone surrogate",
    ),
    (
        replace(GOOD, cache_salt="é" * 129),
        "cache_salt",
        "cache_salt: has 258 bytes, must be at most 256",
    ),
    (
        replace(GOOD, client_request_id="x" * 129),
        "request_id",
        "request_id: has 129 bytes, must be at most 128",
    ),
    (sampling(n=0), "sampling.n", "sampling.n = 0: must be in 1 … 64"),
    (sampling(n=65), "sampling.n", "sampling.n = 65: must be in 1 … 64"),
    (
        sampling(temperature=math.nan),
        "sampling.temperature",
        "sampling.temperature = nan: must be finite and at least 0",
    ),
    (sampling(top_p=0.0), "sampling.top_p", "sampling.top_p = 0.0: must be in (0, 1]"),
    (sampling(max_tokens=0), "sampling.max_tokens", "sampling.max_tokens = 0: must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "field", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_invalid_arguments(model: ModelFacts, call: GenerateCall, field: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate_call(call, model, max_model_len=128)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.field, caught.value.message) == (field, message)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (replace(GOOD, model="gpt"), "model 'gpt' is not served here; known models: 'tiny'"),
        (replace(GOOD, adapter="lora"), "adapter 'lora' is not known; no adapters are served"),
    ],
)
def test_unknown_models_and_adapters_are_not_found(model: ModelFacts, call: GenerateCall, message: str) -> None:
    with pytest.raises(NotFound) as caught:
        validate_call(call, model, max_model_len=128)
    assert caught.value.message == message


@pytest.mark.parametrize(
    "call",
    [
        GOOD,
        replace(GOOD, model="tiny"),
        replace(GOOD, prompt=TokenPrompt((1,) * 127)),
        replace(GOOD, prompt=TextPrompt("x" * MAX_TEXT_BYTES)),
        replace(GOOD, cache_salt="x" * 256),
        options(stop=("x" * 256,) * 16),
        sampling(n=64),
        chat(("user", "x"), kwargs='{"enable_thinking": false}'),
    ],
)
def test_the_largest_that_is_allowed(model: ModelFacts, call: GenerateCall) -> None:
    validate_call(call, model, max_model_len=128)


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 28), (1, 1), (28, 28)])
def test_max_tokens_that_fit(max_tokens: int | None, expected: int) -> None:
    assert resolve_max_tokens(max_tokens, num_prompt_tokens=100, max_model_len=128, fits=1000) == expected


def test_omitted_max_tokens_is_clamped_to_the_pool_and_never_below_one() -> None:
    assert resolve_max_tokens(None, num_prompt_tokens=100, max_model_len=128, fits=7) == 7
    assert resolve_max_tokens(None, num_prompt_tokens=100, max_model_len=128, fits=-5) == 1


def test_explicit_max_tokens_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve_max_tokens(29, num_prompt_tokens=100, max_model_len=128, fits=1000)
    assert caught.value.message == (
        "sampling.max_tokens = 29: must be at most 28: the prompt has 100 tokens, the context length is 128"
    )


def test_template_variables() -> None:
    assert template_variables(ChatPrompt((), template_kwargs_json='{"a": [1]}')) == {"a": [1]}
    assert template_variables(ChatPrompt(())) == {}
    with pytest.raises(InvalidArgument):
        template_variables(ChatPrompt((), template_kwargs_json="[" * 60000))


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    directory = write_model_directory(tmp_path / "plain", byte_level())
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(PagewireError, match="model 'plain' has no chat template; use text or tokens"):
        validate_call(chat(("user", "x")), ModelFacts.load(directory), max_model_len=128)


# --- the model directory ---


def test_model_facts(tmp_path: Path) -> None:
    nested = {"text_config": {"vocab_size": 777, "max_position_embeddings": 99}}
    directory = write_model_directory(tmp_path / "dir", byte_level(), **nested)
    facts = ModelFacts.load(directory, "served")
    assert (facts.name, facts.vocab_size, facts.max_model_len) == ("served", 777, 99)
    assert ModelFacts.load(directory).name == "dir"


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", r"config\.json is broken"), ("[]", r"config\.json is broken: not a JSON object"), (None, "does not exist")],
)
def test_broken_model_directories_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    directory = write_model_directory(tmp_path / "m", byte_level())
    if content is None:
        (directory / "config.json").unlink()
    else:
        (directory / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        ModelFacts.load(directory)
    with pytest.raises(ModelError, match="does not exist"):
        ModelFacts.load(tmp_path / "nowhere")
