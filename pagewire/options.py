"""Every option of every process as frozen pydantic models: type, limits, default, and the help text of its flag."""

import json
import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pagewire.speculative import SpeculativeConfig

_BYTE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_bytes(value: object) -> object:
    """`"512MiB"`, `"2G"` (powers of 1024), `"2GB"` (of 1000) or a plain number; anything else is left to pydantic."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _BYTE_UNITS:
        return value
    return int(float(match[1]) * _BYTE_UNITS[match[2].lower()])


def parse_gib(value: object) -> object:
    """A plain number is GiB, as in vLLM; with a unit it is what `parse_bytes` says."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d+(?:\.\d+)?\s*", value):
        value = float(value)
    return int(value * 1024**3) if isinstance(value, int | float) and math.isfinite(value) else parse_bytes(value)


def _split_commas(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _check_endpoint(value: object) -> object:
    if isinstance(value, str):
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError("must be HOST:PORT with a port in 1 … 65535")
    return value


def _check_redis_url(value: object) -> object:
    schemes = ("redis", "rediss", "valkey", "valkeys", "unix", "redis+sentinel", "redis+cluster")
    if isinstance(value, str) and urlsplit(value).scheme not in schemes:
        raise ValueError(f"must be a URL with one of the schemes {', '.join(f'{scheme}://' for scheme in schemes)}")
    return value


def _as_json(value: object) -> object:
    """A table of a configuration file, or a dict given to `LLM`, as what the flag would have."""
    return json.dumps(value) if isinstance(value, dict) else value


def _check_speculative(value: str) -> str:
    SpeculativeConfig.parse(value)
    return value


def _none_by_name(value: object) -> object:
    return "none" if value is None else value


ByteCount = Annotated[int, BeforeValidator(parse_bytes)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]
GibCount = Annotated[int, BeforeValidator(parse_gib)]
"""Bytes in the end; what is given is GiB unless it has a unit."""
GIB_OPTIONS = frozenset({"kv_offloading_size", "kv_disk_size", "kv_store_size"})
Endpoints = Annotated[tuple[Annotated[str, BeforeValidator(_check_endpoint)], ...], BeforeValidator(_split_commas)]
RedisUrl = Annotated[str, BeforeValidator(_check_redis_url)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


def option(
    default: Any,
    help_text: str,
    *,
    panel: str,
    metavar: str = "",
    shown_default: str = "",
    short: str = "",
    **limits: Any,
) -> Any:
    """A field that is also a flag: `panel` groups it in `--help`, `shown_default` replaces a default of None there.

    `short`: another name of the flag.
    """
    extra: Mapping[str, str] = {"panel": panel, "metavar": metavar, "shown_default": shown_default, "short": short}
    return Field(default, description=help_text, json_schema_extra=dict(extra), **limits)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


_MODEL = "Model"
_ENGINE = "Engine"
_LORA = "LoRA"
_PREFIX_CACHE = "Prefix cache"
_NETWORK = "Network"
_TRANSFER = "KV transfer"
_LIMITS = "Admission and shutdown"
_ROUTING = "Routing"
_SECURITY = "Security"
_OBSERVE = "Observability"


class EngineOptions(_Frozen):
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
    device: Literal["cpu", "cuda"] = option(
        "cpu", "Where the model runs; cuda is for LLM and run-batch so far, and needs the extra gpu.", panel=_ENGINE
    )
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
        "Keep packed weights in the cache directory up to this size; the longest unused go first, those in use stay.",
        panel=_ENGINE,
        metavar="BYTES",
        shown_default="64GiB",
    )
    block_size: int = option(16, "Tokens per KV block.", panel=_ENGINE, metavar="TOKENS", ge=1, le=256)
    kv_cache_memory_bytes: Annotated[ByteCount, Field(ge=1)] | None = option(
        None,
        "Size of the KV pool; 512MiB and 2G work too.",
        panel=_ENGINE,
        metavar="BYTES",
        shown_default="kv-cache-memory-share",
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
    max_num_seqs: int = option(64, "Most sequences in one engine step.", panel=_ENGINE, metavar="N", ge=1, le=4096)
    enable_prefix_caching: bool = option(True, "Keep KV blocks for reuse.", panel=_PREFIX_CACHE, shown_default="on")
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
        None, "Most a process writes there, in GiB; 512MiB works too.", panel=_PREFIX_CACHE, metavar="GIB"
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
        "Most that all workers of a model together keep there, in GiB; 512MiB works too.",
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
        "mp", "What starts the other processes: this one, or a Ray cluster (extra ray), on this machine.", panel=_ENGINE
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

    @model_validator(mode="after")
    def _check_parallel(self) -> Self:
        if self.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size = {self.pipeline_parallel_size}: pipeline parallelism is not supported yet; "
                "tensor_parallel_size is"
            )
        size = self.tensor_parallel_size
        if size > 1 and self.enable_lora:
            raise ValueError(f"enable_lora with tensor_parallel_size = {size}: adapters can't be shared out yet")
        if size > 1 and self.device != "cpu":
            raise ValueError(f"tensor_parallel_size = {size} on device = {self.device} is not supported yet")
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
            if getattr(self, name) is not None and self.device != "cpu":
                raise ValueError(f"{name}: tiers of a pool on device = {self.device} are not supported yet")
        return self


class ProcessConfig(_Frozen):
    """What router and workers have in common."""

    host: str = option("127.0.0.1", "Address to listen on.", panel=_NETWORK, metavar="HOST", min_length=1)
    redis_url: RedisUrl | None = option(
        None, "Redis or Valkey that holds the prefix index.", panel=_NETWORK, metavar="URL", shown_default="none"
    )
    kv_fetch: Literal["auto", "always", "off"] = option(
        "auto",
        "Workers fetch cached KV from other workers instead of computing it: auto when that is estimated to be faster. "
        "A router has to know if they never do.",
        panel=_TRANSFER,
    )
    drain_timeout: Seconds = option(30.0, "Time for running requests after SIGTERM.", panel=_LIMITS, metavar="SECONDS")
    metrics_port: Port | None = option(
        None, "Serve Prometheus metrics on this port.", panel=_OBSERVE, metavar="PORT", shown_default="off"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least level to log.", panel=_OBSERVE)
    log_format: Literal["text", "json"] = option("text", "Form of log lines on stderr.", panel=_OBSERVE)
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = option(
        None,
        "Send OpenTelemetry spans to this OTLP collector (gRPC).",
        panel=_OBSERVE,
        metavar="URL",
        shown_default="off",
    )
    tls_cert: Path | None = option(
        None, "PEM certificate; with tls-key this process speaks TLS.", panel=_SECURITY, metavar="FILE"
    )
    tls_key: Path | None = option(None, "PEM private key of tls-cert.", panel=_SECURITY, metavar="FILE")
    tls_ca: Path | None = option(
        None,
        "PEM CA to verify peers; a server then demands client certificates (mTLS).",
        panel=_SECURITY,
        metavar="FILE",
    )
    auth_token_file: Path | None = option(
        None,
        "One bearer token per line, then what it opens (inference, admin, internal; nothing means all): any is "
        "accepted from callers, the first is sent to peers.",
        panel=_SECURITY,
        metavar="FILE",
    )
    auth_jwks_file: Path | None = option(
        None, "Accept JWTs signed with a key of this JWKS.", panel=_SECURITY, metavar="FILE"
    )
    auth_jwks_url: Annotated[str, Field(pattern=r"^https?://")] | None = option(
        None, "The same from a URL, fetched every 300 s and when a key is unknown.", panel=_SECURITY, metavar="URL"
    )
    auth_jwt_issuer: str | None = option(None, "The `iss` that JWTs must have.", panel=_SECURITY, metavar="TEXT")
    auth_jwt_audience: str | None = option(None, "The `aud` that JWTs must have.", panel=_SECURITY, metavar="TEXT")

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together")
        return self

    @model_validator(mode="after")
    def _check_jwks(self) -> Self:
        sources = (self.auth_jwks_file, self.auth_jwks_url)
        if all(sources):
            raise ValueError("only one of auth_jwks_file and auth_jwks_url can be given")
        if len({any(sources), bool(self.auth_jwt_issuer), bool(self.auth_jwt_audience)}) > 1:
            raise ValueError(
                "auth_jwks_file or auth_jwks_url need auth_jwt_issuer and auth_jwt_audience, and vice versa"
            )
        return self


class WorkerConfig(ProcessConfig):
    """A prefill or decode worker."""

    role: Literal["prefill", "decode"]
    engine: EngineOptions
    port: Port = option(0, "Port to listen on; 0 lets the kernel choose.", panel=_NETWORK, metavar="PORT")
    advertise: str | None = option(
        None,
        "HOST or HOST:PORT at which others reach this worker.",
        panel=_NETWORK,
        metavar="ADDRESS",
        shown_default="host and the bound port",
    )
    worker_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")] | None = option(
        None, "Name of this worker, unique in the cluster.", panel=_NETWORK, metavar="NAME", shown_default="random"
    )
    kv_transfer: Literal["auto", "shm", "grpc", "nixl", "shm_vm", "shm_map", "shm_ring"] = option(
        "auto",
        "How KV blocks travel; auto takes the fastest of shm and grpc that works, nixl falls back to grpc.",
        panel=_TRANSFER,
    )
    kv_lease_seconds: Seconds = option(
        30.0, "How long a finished prefill's blocks wait for the next heartbeat.", panel=_TRANSFER, metavar="SECONDS"
    )
    kv_max_hold_seconds: Seconds = option(
        120.0, "After this a held prefill may be revoked under memory pressure.", panel=_TRANSFER, metavar="SECONDS"
    )
    kv_load_failure_policy: Literal["recompute", "fail"] = option(
        "recompute",
        "When KV did not come after retries: decode computes the rest, or the router asks another prefill worker.",
        panel=_TRANSFER,
    )
    kv_fetch_min_tokens: int = option(
        64, "Never fetch for fewer tokens than this.", panel=_TRANSFER, metavar="TOKENS", ge=1
    )
    max_queued_requests: int = option(
        256, "Requests that may wait; more are refused with a time to retry.", panel=_LIMITS, metavar="N", ge=1
    )
    max_queued_tokens: int = option(1_000_000, "Prompt tokens that may wait.", panel=_LIMITS, metavar="TOKENS", ge=1)

    @model_validator(mode="after")
    def _check_holds(self) -> Self:
        if self.kv_max_hold_seconds < self.kv_lease_seconds:
            raise ValueError(
                f"kv_max_hold_seconds = {self.kv_max_hold_seconds:g} must be at least "
                f"kv_lease_seconds = {self.kv_lease_seconds:g}"
            )
        if self.engine.device != "cpu":
            raise ValueError(
                f"device = {self.engine.device}: a worker can't transfer KV out of device memory yet; "
                "LLM and run-batch can run there"
            )
        if self.role == "prefill" and self.kv_transfer == "shm_map" and self.engine.kv_pool_backing != "memfd":
            raise ValueError("kv_transfer = shm_map needs kv_pool_backing = memfd, a pool that others can map")
        if self.kv_transfer == "nixl" and not any(find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")):
            raise ValueError("kv_transfer = nixl needs NIXL, which is not installed: pip install pagewire[nixl]")
        return self

    def endpoint(self, bound_port: int) -> str:
        """host:port that this worker tells others."""
        if self.advertise is None:
            return f"{self.host}:{bound_port}"
        has_port = re.search(r":\d+$", self.advertise) is not None
        return self.advertise if has_port else f"{self.advertise}:{bound_port}"


class RouterConfig(ProcessConfig):
    """The router."""

    model: Annotated[str, Field(min_length=1)] = option(
        ..., "Model directory: config.json and tokenizer.json; no weights are read.", panel=_MODEL, metavar="PATH"
    )
    served_model_name: str | None = option(
        None, "Name clients ask for.", panel=_MODEL, metavar="NAME", shown_default="the directory's name"
    )
    port: Port = option(50051, "Port to listen on; 0 lets the kernel choose.", panel=_NETWORK, metavar="PORT")
    http_port: Port | None = option(
        None, "Serve OpenAI's HTTP API on this port too.", panel=_NETWORK, metavar="PORT", shown_default="off"
    )
    prefill_workers: Endpoints = option(
        (), "Prefill workers to use besides those in the index.", panel=_NETWORK, metavar="HOST:PORT,…"
    )
    decode_workers: Endpoints = option(
        (), "Decode workers to use besides those in the index.", panel=_NETWORK, metavar="HOST:PORT,…"
    )
    policy: Literal["prefix", "load", "round_robin", "random", "session"] = option(
        "prefix",
        "How workers are chosen; prefix weighs cached tokens against load, session keeps to one worker by the "
        "request's x-session-id.",
        panel=_ROUTING,
    )
    router_temperature: float = option(
        0.0,
        "Chooses among workers at random, cheaper ones likelier: 0 is always the cheapest, 1 gives the dearest e^-1 of "
        "its chance.",
        panel=_ROUTING,
        metavar="T",
        ge=0,
        le=100,
        allow_inf_nan=False,
    )
    local_prefill_max_tokens: int = option(
        0,
        "An uncached rest of up to this many tokens is prefilled by the decode worker itself, unless more than one of "
        "its steps takes are waiting there.",
        panel=_ROUTING,
        metavar="TOKENS",
        ge=0,
    )
    migration_limit: int = option(
        3, "How often a request may move after a lost worker.", panel=_ROUTING, metavar="N", ge=0, le=100
    )
    request_timeout: Seconds = option(
        600.0, "Longest life of a request whose client set no deadline.", panel=_LIMITS, metavar="SECONDS"
    )
    max_concurrent_requests: int = option(
        1024, "Requests in flight; more are refused with a time to retry.", panel=_LIMITS, metavar="N", ge=1
    )
