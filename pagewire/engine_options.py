"""The engine's options, of workers, of `LLM` and of run-batch: names and meaning are vLLM's."""

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from pagewire.option import ByteCount, Frozen, GibCount, Names, RedisUrl, option
from pagewire.speculative import SpeculativeConfig

_MODEL = "Model"
_ENGINE = "Engine"
_LORA = "LoRA"
_PREFIX_CACHE = "Prefix cache"

GIB_OPTIONS = frozenset({"kv_offloading_size", "kv_disk_size", "kv_store_size"})


def _as_json(value: object) -> object:
    """A table of a configuration file, or a dict given to `LLM`, as what the flag would have."""
    return json.dumps(value) if isinstance(value, dict) else value


def _check_speculative(value: str) -> str:
    SpeculativeConfig.parse(value)
    return value


def _none_by_name(value: object) -> object:
    return "none" if value is None else value


class EngineOptions(Frozen):
    """What the engine is built from; names and meaning are vLLM's."""

    model: Annotated[str, Field(min_length=1)] = option(
        ..., "Model directory: config.json, safetensors, tokenizer.json.", panel=_MODEL, metavar="PATH"
    )
    served_model_name: str | None = option(
        None, "Name clients ask for.", panel=_MODEL, metavar="NAME", shown_default="the directory's name"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Compute type; auto takes what the model was saved in.", panel=_MODEL
    )
    model_impl: Literal["auto", "pagewire", "transformers"] = option(
        "auto",
        "Who runs the model: pagewire's own code, or Hugging Face's module over the paged cache; auto takes the first "
        "that knows the architecture.",
        panel=_MODEL,
    )
    device: Literal["cpu", "cuda"] = option("cpu", "Where the model runs; cuda needs the extra gpu.", panel=_ENGINE)
    kernels: Literal["auto", "native", "torch", "reference", "triton"] = option(
        "auto",
        "Kernel set; auto is native where it runs, triton on cuda. Reference accumulates in float64, slow but exact.",
        panel=_ENGINE,
    )
    quantization: Annotated[Literal["none", "int8", "w8a8"], BeforeValidator(_none_by_name)] = option(
        "none", "Int8 weights, made on loading; w8a8: activations too, for integer products.", panel=_MODEL
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "int8"] = option(
        "auto",
        "What the KV cache stores: auto the compute type, the others a byte for each value and a scale for each token "
        "and kv head; fp8 is fp8_e4m3. The same on all workers of a model.",
        panel=_ENGINE,
    )
    packed_cache_bytes: Annotated[ByteCount, Field(ge=0)] = option(
        64 << 30,
        "Keep packed weights in the cache directory up to this size in bytes; the longest unused go first, those in "
        "use stay.",
        panel=_ENGINE,
        metavar="BYTES",
        shown_default="64GiB",
    )
    block_size: int = option(16, "Tokens per KV block.", panel=_ENGINE, metavar="TOKENS", ge=1, le=256)
    kv_cache_memory_bytes: Annotated[ByteCount, Field(ge=1)] | None = option(
        None,
        "Size of the KV pool in bytes; 512MiB and 2G work too.",
        panel=_ENGINE,
        metavar="BYTES",
        shown_default="kv-cache-memory-share; on cuda gpu-memory-utilization",
    )
    kv_cache_memory_share: float = option(
        0.4,
        "Part of the available memory that the KV pool takes, but no more than max-num-seqs sequences of full length "
        "can use; `up` divides it among its workers.",
        panel=_ENGINE,
        metavar="SHARE",
        gt=0,
        le=1,
    )
    kv_cache_prefault: bool = option(
        False,
        "Give the whole KV pool its memory at the start, which takes a moment for each GiB: no page faults while "
        "serving, and memory that isn't there shows at once. A pool on cuda has it anyway.",
        panel=_ENGINE,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "On cuda: part of the GPU's memory for weights, activations and KV pool together. The pool gets what a "
        "profiling step leaves; `up` divides the part among its workers.",
        panel=_ENGINE,
        metavar="PART",
        gt=0,
        le=1,
    )
    max_model_len: Annotated[int, Field(ge=1)] | None = option(
        None, "Longest sequence, prompt and output.", panel=_ENGINE, metavar="TOKENS", shown_default="the model's"
    )
    max_num_batched_tokens: int = option(
        512,
        "Most tokens in one engine step; also the chunk of a long prefill.",
        panel=_ENGINE,
        metavar="TOKENS",
        ge=1,
        le=1 << 20,
    )
    target_step_ms: int = option(
        0,
        "About how long a step with prompts may take: on a slow machine long prompts then come in smaller chunks, and "
        "requests that arrive meanwhile wait less; 0: max-num-batched-tokens alone counts.",
        panel=_ENGINE,
        metavar="MS",
        ge=0,
        le=60_000,
    )
    max_num_seqs: int = option(64, "Most sequences in one engine step.", panel=_ENGINE, metavar="N", ge=1, le=4096)
    enable_prefix_caching: bool = option(True, "Keep KV blocks for reuse.", panel=_PREFIX_CACHE)
    disable_hybrid_kv_cache_manager: bool = option(
        False,
        "Layers with a sliding window keep the KV of the whole sequence, as all others do. All workers of a model must "
        "agree.",
        panel=_PREFIX_CACHE,
    )
    kv_offloading_size: Annotated[GibCount, Field(ge=1)] | None = option(
        None,
        "Host memory for KV blocks that the pool may evict, in GiB; 512MiB works too. They are loaded back instead of "
        "computed again; `up` gives each worker as much.",
        panel=_PREFIX_CACHE,
        metavar="GIB",
        shown_default="off",
    )
    kv_disk_path: Path | None = option(
        None,
        "Directory for KV blocks on disk, behind host memory; they survive a restart with the same model. Each process "
        "takes a place of its own there.",
        panel=_PREFIX_CACHE,
        metavar="DIR",
        shown_default="off",
    )
    kv_disk_size: Annotated[GibCount, Field(ge=1)] | None = option(
        None,
        "Most that a process keeps in kv-disk-path, in GiB; 512MiB works too. Needed with it.",
        panel=_PREFIX_CACHE,
        metavar="GIB",
    )
    kv_store_url: RedisUrl | None = option(
        None,
        "Redis or Valkey that all workers of a model share as the lowest tier of the prefix cache: a server of its "
        "own, or at least another database than the index's.",
        panel=_PREFIX_CACHE,
        metavar="URL",
        shown_default="off",
    )
    kv_store_size: Annotated[GibCount, Field(ge=1)] | None = option(
        None,
        "Most that all workers of a model together keep in kv-store-url, in GiB; 512MiB works too. Needed with it.",
        panel=_PREFIX_CACHE,
        metavar="GIB",
    )
    tensor_parallel_size: int = option(
        1,
        "Processes that share the model out, each with a part of the weights and of the KV heads.",
        panel=_ENGINE,
        metavar="N",
        short="-tp",
        ge=1,
        le=64,
    )
    pipeline_parallel_size: int = option(
        1, "Stages of layers; more than one is not supported yet.", panel=_ENGINE, metavar="N", ge=1
    )
    distributed_executor_backend: Literal["mp", "ray"] = option(
        "mp",
        "What starts the other processes: this one, or a Ray cluster (extra ray), on one machine or several.",
        panel=_ENGINE,
    )
    enforce_eager: bool = option(
        False,
        "Launch every kernel of a step instead of replaying a CUDA graph, on the CPU a record: slower, but saves their "
        "memory and the graphs' seconds at the start.",
        panel=_ENGINE,
    )
    max_seq_len_to_capture: int = option(
        8192,
        "Decode steps with longer sequences than this run without CUDA graphs.",
        panel=_ENGINE,
        metavar="TOKENS",
        ge=1,
    )
    async_scheduling: bool | None = option(
        None,
        "Plan and start the next decode step while the device works on this one; tokens are the same.",
        panel=_ENGINE,
        shown_default="on with device cuda",
    )
    cpu_threads: int = option(0, "Threads of the kernels; 0 takes all CPUs.", panel=_ENGINE, metavar="N", ge=0, le=1024)
    kv_pool_backing: Literal["private", "memfd"] = option(
        "private", "Memory of the pool; memfd can be mapped by other processes (for shm_map).", panel=_ENGINE
    )

    speculative_config: Annotated[str, BeforeValidator(_as_json), AfterValidator(_check_speculative)] | None = option(
        None,
        'Guess tokens and check several in one step; the output stays the same. JSON with vLLM\'s keys: {"method": '
        '"ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}, or {"model": "DIR"} for a draft model.',
        panel=_ENGINE,
        metavar="JSON",
        shown_default="off",
    )

    enable_lora: bool = option(False, "Serve LoRA adapters beside the base model.", panel=_LORA)
    max_loras: int = option(
        8, "Most adapters in one engine step, and on the device.", panel=_LORA, metavar="N", ge=1, le=1024
    )
    max_lora_rank: int = option(16, "Largest rank of an adapter.", panel=_LORA, metavar="RANK", ge=1, le=1024)
    max_cpu_loras: int = option(256, "Most adapters in host memory.", panel=_LORA, metavar="N", ge=1, le=65536)
    lora_modules: Names = option(
        (), "Adapters to load at start: directories as PEFT writes them.", panel=_LORA, metavar="NAME=PATH,…"
    )
    lora_root: Path | None = option(
        None,
        "Directory below which AdminService may load adapters.",
        panel=_LORA,
        metavar="PATH",
        shown_default="none may be loaded at run time",
    )

    @property
    def has_device_pool(self) -> bool:
        """The host can't see the KV pool's memory; in Triton's interpreter it behaves so."""
        return self.device != "cpu" or self.kernels == "triton"

    @model_validator(mode="after")
    def _check_parallel(self) -> Self:
        if self.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size = {self.pipeline_parallel_size}: pipeline parallelism is not supported yet; "
                "tensor_parallel_size is"
            )
        if self.tensor_parallel_size > 1 and self.device != "cpu" and self.distributed_executor_backend != "mp":
            raise ValueError(
                f"tensor_parallel_size = {self.tensor_parallel_size} on device = {self.device} needs "
                f"distributed_executor_backend = mp, not {self.distributed_executor_backend}"
            )
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if not self.enable_lora and (self.lora_modules or self.lora_root is not None):
            raise ValueError("lora_modules and lora_root need enable_lora")
        return self

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        if (self.kv_disk_path is None) != (self.kv_disk_size is None):
            raise ValueError("kv_disk_path and kv_disk_size must be given together")
        if (self.kv_store_url is None) != (self.kv_store_size is None):
            raise ValueError("kv_store_url and kv_store_size must be given together")
        for name in ("kv_offloading_size", "kv_disk_path", "kv_store_url"):
            if getattr(self, name) is not None and not self.enable_prefix_caching:
                raise ValueError(f"{name} needs enable_prefix_caching: a tier holds cached blocks")
        return self
