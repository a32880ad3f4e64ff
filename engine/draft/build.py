"""Loads the draft model of `--speculative-config` and puts it beside the served one."""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine.draft.book import DraftBook
from engine.draft.drafter import Drafter
from engine.draft.runner import DraftRunner
from engine.errors import EngineError, ModelError
from engine.kernel_set import load_kernel_set
from engine.loading import LoadedModel
from engine.memory import KV_FORMATS, KvLayout, KvMemory
from engine.model_config import ModelConfig, load_model_config
from engine.models.decoder import Decoder
from engine.models.registry import load_model
from engine.step_replay import MAX_ROWS, replaying
from engine.transformers_config import ServedConfig
from engine.weights_digest import weights_digest
from kvstore.tokenizer_digest import tokenizer_digest
from pagewire.config import EngineOptions
from pagewire.speculative import SpeculativeConfig

_FIELD = "speculative_config.model"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model that fits the served one.

    `cost`: bytes of weights that a token's forward reads, relative to it; `replays`: its steps run from a record where
    they can. `prefault_threads`: as many give its memory its pages at the start; 0: pages come as they are written.
    """

    model: Decoder
    layout: KvLayout
    cost: float
    replays: bool
    prefault_threads: int

    def start(
        self, num_blocks: int, generations: NDArray[np.uint64], config: SpeculativeConfig, target: ServedConfig
    ) -> Drafter:
        """With KV memory for each block of the pool, whose `generations` these are."""
        forward = replaying(self.model, MAX_ROWS) if self.replays else None
        memory = KvMemory(self.layout, num_blocks)
        if self.prefault_threads:
            memory.prefault(self.prefault_threads)
        return Drafter(
            DraftRunner(self.model, memory, target.eos_token_ids, forward),
            DraftBook(self.layout.block_size, generations),
            max_position=self.model.config.max_position,
            max_catch_up_tokens=config.max_catch_up_tokens,
            eos_token_ids=frozenset(target.eos_token_ids),
        )


def load_draft(
    speculative: SpeculativeConfig, options: EngineOptions, target: LoadedModel, threads: int
) -> LoadedDraft:
    """Raises EngineError that names the key, when the model can't be loaded or does not fit `target`."""
    path = speculative.model or ""
    quantization = None if speculative.quantization == "none" else speculative.quantization
    try:
        config = load_model_config(path, dtype=speculative.dtype or options.dtype, max_model_len=options.max_model_len)
        _check_vocabulary(config, target.config)
        model = load_model(
            config,
            load_kernel_set(options.kernels, threads, quantization),
            digest=weights_digest(config.path),
            packed_cache_bytes=options.packed_cache_bytes,
        )
    except ModelError as error:
        raise EngineError(f"{_FIELD}: {error}") from error
    kv_format = KV_FORMATS[options.kv_cache_dtype]
    layout = KvLayout.of(config, options.block_size, kv_format=kv_format)
    cost = model.num_bytes_read / target.model.num_bytes_read
    logger.info("draft model %s: a token reads %.0f%% of the bytes that the served model's does", path, 100 * cost)
    prefault_threads = threads if options.kv_cache_prefault else 0
    return LoadedDraft(model, layout, cost, not options.enforce_eager, prefault_threads)


def _check_vocabulary(draft: ModelConfig, target: ServedConfig) -> None:
    """Token ids are all that the two models say to each other."""
    if draft.vocab_size != target.vocab_size:
        raise ModelError(
            f"{draft.path} has a vocabulary of {draft.vocab_size} tokens, {target.path} one of {target.vocab_size}; "
            "a draft model must have the same tokenizer"
        )
    if tokenizer_digest(draft.path) == tokenizer_digest(target.path):
        return
    ours, theirs = _vocabulary(target.path), _vocabulary(draft.path)
    if not ours or not theirs:  # nothing can be said against it
        return
    other = next((token_id for token_id in sorted(ours | theirs) if ours.get(token_id) != theirs.get(token_id)), None)
    if other is not None:
        raise ModelError(
            f"{draft.path} has another tokenizer than {target.path}: token {other} is {theirs.get(other)!r} there and "
            f"{ours.get(other)!r} here; a draft model must have the same one"
        )


def _vocabulary(directory: Path) -> dict[int, str]:
    """Token by id; empty if there is no tokenizer.json. Raises ModelError."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return {}
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare ones
        raise ModelError(f"{file} is broken: {error}") from error
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
