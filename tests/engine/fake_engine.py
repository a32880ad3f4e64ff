"""An engine on the fake runner: everything but the model."""

from pathlib import Path

import torch

from engine.admission import SchedulerConfig
from engine.build import EngineParts
from engine.engine import Engine
from engine.kv_cache import KvCache
from engine.memory import KvLayout, KvMemory
from engine.model_config import ModelConfig
from engine.scheduler import Scheduler
from kvstore.block_pool import BlockPool
from pagewire.config import EngineOptions
from tests.engine.fake_runner import EOS, VOCAB_SIZE, FakeRunner


def fake_engine(
    *, num_blocks: int = 16, block_size: int = 4, max_model_len: int = 40, max_num_seqs: int = 4
) -> tuple[Engine, FakeRunner]:
    """The engine and its runner."""
    options = EngineOptions(model="fake", block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
    memory = KvMemory(KvLayout(1, 1, 2, block_size, torch.float32), num_blocks)
    cache = KvCache(BlockPool(num_blocks, generations=memory.generations), b"r" * 32, block_size)
    config = SchedulerConfig(16, max_num_seqs, block_size, max_model_len, frozenset({EOS}), VOCAB_SIZE)
    runner = FakeRunner(num_blocks, block_size)
    parts = EngineParts(_model_config(), memory, cache, Scheduler(config, cache), runner, "fake/tp1")
    return Engine(options, parts=parts), runner


def _model_config() -> ModelConfig:
    return ModelConfig(
        path=Path("fake"),
        architecture="LlamaForCausalLM",
        family="llama",
        dtype=torch.float32,
        num_layers=1,
        hidden_size=2,
        intermediate_size=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=VOCAB_SIZE,
        max_position=512,
        norm_eps=1e-6,
        norm_unit_offset=False,
        activation="silu",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        attention_scale=1.0,
        attention_cap=None,
        final_cap=None,
        embedding_scale=None,
        tie_word_embeddings=False,
        layer_windows=(None,),
        layer_ropes=(),
        eos_token_ids=(EOS,),
        bos_token_id=None,
    )
