"""The config of one rank's part of a model, and what of a model and its options can't be shared out."""

import os
from dataclasses import replace

from engine.errors import ModelError
from engine.memory import KvLayout
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder, Model
from engine.moe_config import MoeConfig
from engine.parallel.shard import Shard, check_divisible
from engine.transformers_config import TransformersConfig, load_config
from pagewire.config import EngineOptions


def shard_config(config: ModelConfig, rank: int, size: int) -> ModelConfig:
    """The config with this rank's heads, MLP and vocabulary. Raises ModelError if they can't be shared evenly."""
    moe = config.moe
    sizes = {"intermediate_size": config.intermediate_size}
    if moe is not None:
        sizes = {} if all(moe.layers) else sizes
        sizes["moe_intermediate_size"] = moe.intermediate_size  # that of shared experts is a multiple of it
    try:
        check_divisible(size, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, **sizes)
    except ValueError as error:
        raise ModelError(f"{config.path}: tensor_parallel_size = {size}: {error}") from None
    shard = Shard(rank, size, config.num_kv_heads, config.head_dim, config.vocab_size)
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=len(shard.kv_heads),
        intermediate_size=config.intermediate_size // size,
        vocab_size=len(shard.vocabulary),
        moe=None if moe is None else _shard_experts(moe, size),
        shard=shard,
    )


def share_of_threads(options: EngineOptions, num_sharing: int) -> int:
    """Of `cpu_threads`, or of the CPUs that this process may use, the part of one of so many ranks; at least one."""
    threads = options.cpu_threads or len(os.sched_getaffinity(0))
    return max(1, threads // num_sharing)


def layout_of_rank(layout: KvLayout, model: Model) -> KvLayout:
    """Of the heads that a model's part has; all of them if it is whole."""
    shard = model.config.shard if isinstance(model, Decoder) else None
    return layout if shard is None else replace(layout, num_kv_heads=len(shard.kv_heads))


def check_parallel(options: EngineOptions) -> None:
    """Raises ModelError, before anything is loaded, for what can't run on several ranks."""
    size = options.tensor_parallel_size
    config = load_config(
        options.model, dtype=options.dtype, max_model_len=options.max_model_len, model_impl=options.model_impl
    )
    if isinstance(config, TransformersConfig):
        raise ModelError(
            f"{config.path}: tensor_parallel_size = {size} is not supported with model_impl = transformers: "
            "its module is proved at start by computing it whole, which no rank has"
        )
    shard_config(config, 0, size)


def _shard_experts(moe: MoeConfig, size: int) -> MoeConfig:
    """Each rank has a part of every expert."""
    own = moe.deepseek
    own = None if own is None else replace(own, shared_size=own.shared_size // size)
    return replace(moe, intermediate_size=moe.intermediate_size // size, deepseek=own)
