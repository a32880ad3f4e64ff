"""The adapters' store and slots of an engine that serves them, with those that are loaded at start."""

import logging
from functools import partial
from pathlib import Path

from engine.lora.checkpoint import modules_of
from engine.lora.slots import AdapterSlots
from engine.lora.store import AdapterStore, parse_lora_modules
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder
from engine.parallel.adapters import whole_projections
from pagewire.config import EngineOptions

logger = logging.getLogger(__name__)


def build_adapters(options: EngineOptions, config: ModelConfig, model: Decoder) -> tuple[AdapterStore, AdapterSlots]:
    """Raises AdapterError: what `lora_modules` names at start must be there and fit.

    The store has whole adapters, with `config` the whole model's; the slots are of what `model` has of it.
    """
    slots = build_slots(options, model)
    projections = whole_projections(model.adaptable, model.config.shard)
    store = AdapterStore(
        config,
        modules_of(projections),
        max_rank=options.max_lora_rank,
        max_adapters=options.max_cpu_loras,
        root=options.lora_root,
        reserved=frozenset({options.served_model_name or Path(options.model).name}),
    )
    slots.on_change = partial(setattr, store, "resident")
    for name, path in parse_lora_modules(options.lora_modules).items():
        loaded = store.load(name, path, 0, below_root=False)
        logger.info("adapter %s: rank %d, %d KiB", name, loaded.rank, loaded.num_bytes >> 10)
    return store, slots


def build_slots(options: EngineOptions, model: Decoder) -> AdapterSlots:
    """Those for what `model`, maybe a rank's part, has of each adapter."""
    return AdapterSlots(
        model.adaptable, model.config.dtype, max_loras=options.max_loras, max_rank=options.max_lora_rank
    )
