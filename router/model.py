"""What the router must know about the model: its tokenizer and a few numbers of config.json. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewire.text.tokenizer import Tokenizer, TokenizerError

_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_UNLIMITED = 1 << 30


class ModelError(ValueError):
    """The model directory cannot be served; the message names the file."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A served model. `max_model_len` is the architecture's own limit; workers may have a lower one."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, directory: Path, name: str | None = None) -> "ModelFacts":
        """Reads config.json and the tokenizer; raises ModelError."""
        path = directory / "config.json"
        if not directory.is_dir():
            raise ModelError(f"model directory {directory} does not exist")
        if not path.is_file():
            raise ModelError(f"{path} does not exist: not a model directory")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is broken: {error}") from error
        if not isinstance(config, dict):
            raise ModelError(f"{path} is broken: not a JSON object")
        # Multimodal configs keep the language model's numbers one level down.
        text = config.get("text_config")
        numbers: Mapping[str, object] = {**config, **text} if isinstance(text, dict) else config
        try:
            tokenizer = Tokenizer.load(directory)
        except TokenizerError as error:
            raise ModelError(str(error)) from error
        vocab_size = _positive(numbers.get("vocab_size"), default=tokenizer.num_tokens)
        lengths = (_positive(numbers.get(key), default=0) for key in _LENGTH_NAMES)
        length = next((value for value in lengths if value), _UNLIMITED)
        eos_token_ids = _eos_token_ids(directory, (config, numbers))
        return cls(name or directory.resolve().name, tokenizer, vocab_size, length, eos_token_ids)


def _eos_token_ids(directory: Path, configs: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
    """generation_config.json's, else the config's, as workers have them."""
    path = directory / "generation_config.json"
    try:
        generation = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is broken: {error}") from error
    sources = (generation, *configs) if isinstance(generation, dict) else configs
    found = next((value for source in sources if (value := source.get("eos_token_id")) is not None), [])
    ids = found if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))


def _positive(value: object, *, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default
