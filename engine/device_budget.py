"""Measures what the loaded model's largest steps take of a GPU, and says what is left for the KV pool."""

from engine.decode_graphs import captures_steps, graph_bytes
from engine.decode_step import DecodeStep
from engine.device_memory import DeviceProfile, pool_budget
from engine.device_sampler import DeviceSampler
from engine.device_staging import staging_bytes
from engine.largest_steps import OneBlock, StepLimits, run_largest_steps
from engine.loading import LoadedModel
from engine.memory import KvLayout
from engine.models.decoder import Decoder
from engine.sizing import PoolBudget
from kvstore.kv_groups import KvGroups
from pagewire.config import EngineOptions
from pagewire.speculative import SpeculativeConfig


def measure_budget(
    profile: DeviceProfile,
    options: EngineOptions,
    served: LoadedModel,
    layout: KvLayout,
    groups: KvGroups,
) -> PoolBudget:
    """Raises EngineError if weights and activations leave no room."""
    model, longest = served.model, served.config.max_position
    if not isinstance(model, Decoder):
        raise TypeError(f"{type(model).__name__} runs on no device")  # `engine.loading` has refused it
    drafts, tokens = options.speculative_config, options.max_num_batched_tokens
    limits = StepLimits(
        tokens,
        options.max_num_seqs,
        min(longest, options.max_model_len or longest),
        0 if drafts is None else SpeculativeConfig.parse(drafts).num_speculative_tokens,
    )
    sampler = DeviceSampler(served.config.vocab_size)
    use = profile.measure(lambda: run_largest_steps(model, sampler, layout, groups, limits))
    graphs = 0
    if captures_steps(model, enforce_eager=options.enforce_eager):
        kept, max_rows = min(limits.max_model_len, options.max_seq_len_to_capture), min(limits.max_num_seqs, tokens)
        memory = OneBlock(layout, groups, model.kernels.device)
        step = DecodeStep(model, memory, layout.block_size, max_rows=max_rows, max_model_len=kept)
        activations = profile.measure(lambda: step.run(max_rows, kept)).activations
        graphs = graph_bytes(activations, max_rows, served.config.vocab_size)
    staging = staging_bytes(layout.block_bytes)
    return pool_budget(use, options.gpu_memory_utilization, staging, tokens, graphs)
