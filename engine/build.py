"""Builds an engine's parts from its options: config, weights, KV memory, pool, scheduler, runner, in this order."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine.admission import SchedulerConfig
from engine.decode_pipeline import StartingRunner
from engine.device_memory import DeviceProfile, open_device_memory
from engine.device_turn import device_turn
from engine.draft.drafter import Drafter
from engine.draft_costs import DraftCosts
from engine.kv_cache import KvCache
from engine.lora.slots import AdapterSlots
from engine.lora.store import AdapterStore
from engine.memory import KV_FORMATS, KvLayout, KvMemory
from engine.parallel.config import layout_of_rank, share_of_threads
from engine.parallel.devices import take_device
from engine.parallel.ranks import Ranks
from engine.parallel.start import start_ranks
from engine.permitted_drafts import PermittedDrafts
from engine.prompt_lookup import NgramProposer
from engine.recent_texts import RecentTexts
from engine.sample import SampledToken
from engine.scheduler import Scheduler
from engine.sequence import Schedule
from engine.sizing import available_memory, size_pool
from engine.speculation import Speculator
from engine.step_pace import StepPace
from engine.suffix_proposer import SuffixProposer
from engine.tiers.build import build_tiers
from engine.tiers.disk_format import KV_VERSION
from engine.tiers.kv_tiers import KvTiers
from engine.transformers_config import ServedConfig
from kvstore.block_pool import BlockPool
from kvstore.hashing import root_key
from kvstore.kv_groups import KvGroups, plan_groups, sliding_windows
from pagewire.config import EngineOptions
from pagewire.speculative import SpeculativeConfig

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Executes a step on the device: block copies, forward, sampling. One list of tokens for each item."""

    def execute(self, schedule: Schedule) -> list[list[SampledToken]]: ...


class LoadedRunner(Runner, StartingRunner, Protocol):
    """A runner of a model."""

    @property
    def numerics_class(self) -> str: ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is put together from."""

    config: ServedConfig
    memory: KvMemory
    kv_cache: KvCache
    scheduler: Scheduler
    runner: Runner
    numerics_class: str
    adapters: AdapterStore | None = None
    tiers: KvTiers | None = None
    drafter: Drafter | None = None
    ranks: Ranks | None = None
    costs: DraftCosts | None = None
    pace: StepPace | None = None
    starting_runner: StartingRunner | None = None
    """The runner, if the next step is to be started while one runs (asynchronous scheduling)."""


def build_parts(options: EngineOptions, progress: Progress | None = None) -> EngineParts:
    """Loads the model and sizes everything. Raises EngineError (ModelError for a model that cannot be served)."""
    ranks = start_ranks(options)
    try:
        with ExitStack() as turn:
            return _build_parts(options, progress, ranks, turn)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _build_parts(
    options: EngineOptions, progress: Progress | None, ranks: Ranks | None, turn: ExitStack
) -> EngineParts:
    """`turn` ends when everything has its memory."""
    # Here, not above: an engine on a fake runner needs none of it.
    from engine.draft.build import load_draft
    from engine.kernel_set import load_kernel_set
    from engine.loading import load_served_model
    from engine.runner import ModelRunner, set_cpu_threads
    from engine.sampler_choice import sampler_for
    from engine.step_replay import most_rows, replaying

    quantization = None if options.quantization == "none" else options.quantization
    num_here = 1 if ranks is None else ranks.machines.num_here
    threads = set_cpu_threads(share_of_threads(options, num_here))
    device = options.device if ranks is None else take_device(options, 0)
    kernels = load_kernel_set(options.kernels, threads, quantization, device)
    device_memory = open_device_memory(kernels.device)
    profile = None
    if device_memory is not None:
        turn.enter_context(device_turn(device_memory.uuid()))
        profile = DeviceProfile(device_memory)
    served = load_served_model(options, kernels, progress)
    config, slots = served.config, served.slots
    kv_format = KV_FORMATS[options.kv_cache_dtype]
    speculative = None if options.speculative_config is None else SpeculativeConfig.parse(options.speculative_config)
    has_draft = speculative is not None and speculative.method == "draft_model"
    groups = _plan_groups(options, config, has_draft=has_draft)
    layout = KvLayout.of(config, options.block_size, num_layers=groups.layers_per_block, kv_format=kv_format)
    draft = load_draft(speculative, options, served, threads) if speculative is not None and has_draft else None
    if ranks is not None:
        ranks.wait_loaded(served.digest)  # else the pool would get the memory that their weights are about to take
    budget = None
    if profile is not None and options.kv_cache_memory_bytes is None:
        from engine.device_budget import measure_budget  # it imports triton

        budget = measure_budget(profile, options, served, layout_of_rank(layout, served.model), groups)
    free = max(0, available_memory() - _slot_bytes(slots, num_here))
    size = size_pool(
        block_bytes=layout.block_bytes,
        draft_block_bytes=0 if draft is None else draft.layout.block_bytes,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_position=config.max_position,
        max_model_len=options.max_model_len,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        kv_cache_memory_share=options.kv_cache_memory_share,
        available_bytes=free if ranks is None else ranks.machines.pool_bytes(free, layout, ranks.loaded),
        budget=budget,
        groups=groups,
    )
    root = root_key(
        weights_digest=served.digest,
        kv_config=config.kv_config(),
        compute_dtype=config.dtype_name,
        kv_dtype=kv_format or config.dtype_name,
        quantization=quantization_name(options, config),
        block_size=options.block_size,
        group_layout=groups.layout,
        kv_version=KV_VERSION,
    )
    is_mapped = num_here > 1 and not options.has_device_pool
    backing = "memfd" if is_mapped else options.kv_pool_backing
    staged = kernels.NAME == "triton"  # in the interpreter too: the host then has the pool as a device would
    memory = KvMemory(layout, size.num_blocks, backing, kernels.device, groups, staged=staged)
    if options.kv_cache_prefault:
        memory.prefault(threads)
    pool = BlockPool(
        size.num_blocks,
        enable_caching=options.enable_prefix_caching,
        generations=memory.generations,
        num_groups=len(groups),
        closes_chains=groups.groups[0].window is not None,
    )
    kv_cache = KvCache(pool, root, options.block_size, groups)
    speculator, drafter = None, None
    if speculative is not None and draft is not None:
        drafter = draft.start(size.num_blocks, pool.generations, speculative, config)
        speculator = Speculator(speculative, drafter, draft.cost)
    elif speculative is not None:
        speculator = _look_up(speculative, config.vocab_size)
    model = served.model
    if ranks is not None:
        model = shared = ranks.join(served.model, memory, config.vocab_size)
        if slots is not None:
            shared.share(slots)
    limits = scheduler_config(options, config, size.max_model_len)
    runner: LoadedRunner
    if kernels.NAME == "triton":
        from engine.device_runner import build_device_runner  # it imports triton

        runner = build_device_runner(options, config, model, memory, limits)
    else:
        sampler = sampler_for(kernels, config.vocab_size)
        forward = None if options.enforce_eager else replaying(model, most_rows(limits))
        runner = ModelRunner(config, model, memory, sampler, slots, forward=forward)
    tiers = build_tiers(options, memory, kv_cache, runner.numerics_class)
    pace = None
    if options.target_step_ms:
        pace = StepPace(options.target_step_ms / 1e3, options.max_num_batched_tokens)
    scheduler = Scheduler(limits, kv_cache, speculator, tiers, pace)
    return EngineParts(
        config,
        memory,
        kv_cache,
        scheduler,
        runner,
        runner.numerics_class,
        served.adapters,
        tiers,
        drafter,
        ranks,
        None if speculator is None else speculator.costs,
        pace,
        runner if _schedules_ahead(options, speculates=speculator is not None) else None,
    )


def _schedules_ahead(options: EngineOptions, *, speculates: bool) -> bool:
    """Whether asynchronous scheduling is asked for, and can be."""
    if speculates and options.async_scheduling:
        logger.warning("async_scheduling is off: drafts follow the token before them")
    is_asked = options.device != "cpu" if options.async_scheduling is None else options.async_scheduling
    return is_asked and not speculates


def _look_up(config: SpeculativeConfig, vocab_size: int) -> Speculator:
    """Drafts out of texts."""
    if config.method == "suffix":
        suffix = SuffixProposer(config.prompt_lookup_min, RecentTexts(config.max_cached_tokens))
        return Speculator(config, PermittedDrafts(suffix, vocab_size), on_end=suffix.ended)
    lookup = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    return Speculator(config, PermittedDrafts(lookup, vocab_size))


def quantization_name(options: EngineOptions, config: ServedConfig) -> str:
    """What the key's root says of the weights.

    Ranks make int8 scales of what each has of a row, so they differ; a checkpoint's are the same whoever has them.
    """
    size = options.tensor_parallel_size
    if config.quantization_label or options.quantization == "none" or size == 1:
        return config.quantization_label or options.quantization
    return f"{options.quantization}/tp{size}"


def _plan_groups(options: EngineOptions, config: ServedConfig, *, has_draft: bool) -> KvGroups:
    """The KV groups of the model's layers; one, with a log line, where something cannot do with several.

    Not by what the pool holds: workers with pools of different sizes exchange KV, so they need the same groups.
    """
    longest = min(config.max_position, options.max_model_len or config.max_position)
    windows = sliding_windows(config.layer_windows, longest)
    reason = next(
        (
            name
            for name, is_there in {
                "disable_hybrid_kv_cache_manager": options.disable_hybrid_kv_cache_manager,
                "the draft model's KV has their blocks too": has_draft and None not in windows,
                "all of them slide, kv_offloading_size": options.kv_offloading_size is not None and None not in windows,
                "all of them slide, kv_disk_path": options.kv_disk_path is not None and None not in windows,
                "all of them slide, kv_store_url": options.kv_store_url is not None and None not in windows,
            }.items()
            if is_there
        ),
        None,
    )
    plan = partial(
        plan_groups,
        windows,
        block_size=options.block_size,
        max_chunk=options.max_num_batched_tokens,
    )
    groups = plan(one=reason is not None, latent=config.is_latent)
    if reason is not None and any(windows):
        logger.warning("layers with a window keep the KV of the whole sequence: %s", reason)
    return groups


def _slot_bytes(slots: AdapterSlots | None, num_ranks: int) -> int:
    """Of the ranks on this machine: rank 0's part of a layer is no smaller than another's."""
    return 0 if slots is None else slots.num_layer_bytes * num_ranks


def scheduler_config(options: EngineOptions, config: ServedConfig, max_model_len: int) -> SchedulerConfig:
    """The scheduler's limits; `max_num_seqs` is lowered to what a step's tokens allow, with a log line."""
    if options.max_num_seqs > options.max_num_batched_tokens:
        logger.warning(
            "max_num_seqs lowered from %d to max_num_batched_tokens = %d: "
            "every running sequence takes part in every step",
            options.max_num_seqs,
            options.max_num_batched_tokens,
        )
        options = options.model_copy(update={"max_num_seqs": options.max_num_batched_tokens})
    return SchedulerConfig(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(config.eos_token_ids),
        vocab_size=config.vocab_size,
        max_loras=options.max_loras if options.enable_lora else 0,
    )
