"""The configuration of every process as frozen pydantic models: type, limits, default, and the help of each flag."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pagewire.engine_options import EngineOptions
from pagewire.option import Endpoints, Frozen, Port, RedisUrl, Seconds, option

_MODEL = "Model"
_NETWORK = "Network"
_TRANSFER = "KV transfer"
_LIMITS = "Admission and shutdown"
_ROUTING = "Routing"
_SECURITY = "Security"
_OBSERVE = "Observability"


class ProcessConfig(Frozen):
    """What router and workers have in common."""

    host: str = option("127.0.0.1", "Address to listen on.", panel=_NETWORK, metavar="HOST", min_length=1)
    redis_url: RedisUrl | None = option(
        None, "Redis or Valkey that holds the prefix index.", panel=_NETWORK, metavar="URL", shown_default="none"
    )
    kv_fetch: Literal["auto", "always", "off"] = option(
        "auto",
        "Workers fetch cached KV from other workers instead of computing it: auto when that is estimated to be faster, "
        "always also when it is not, and when the other one has to load it from its tiers for it. A router has to know "
        "if they never do.",
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
    kv_transfer: Literal["auto", "shm", "tcp", "grpc", "nixl", "shm_vm", "shm_map", "shm_ring"] = option(
        "auto",
        "How KV blocks travel; auto takes the first of shm, tcp and grpc that works, nixl falls back to tcp and grpc.",
        panel=_TRANSFER,
    )
    kv_transfer_port: Port = option(
        0, "Port of the transfer plane tcp; 0 lets the kernel choose.", panel=_TRANSFER, metavar="PORT"
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
    max_queued_tokens: int = option(
        1_000_000,
        "Prompt tokens that may wait; more are refused with a time to retry.",
        panel=_LIMITS,
        metavar="TOKENS",
        ge=1,
    )

    @model_validator(mode="after")
    def _check_holds(self) -> Self:
        if self.kv_max_hold_seconds < self.kv_lease_seconds:
            raise ValueError(
                f"kv_max_hold_seconds = {self.kv_max_hold_seconds:g} must be at least "
                f"kv_lease_seconds = {self.kv_lease_seconds:g}"
            )
        if self.kv_transfer_port and self.kv_transfer_port == self.port:
            raise ValueError(f"kv_transfer_port = {self.kv_transfer_port} must be another one than port")
        if self.engine.has_device_pool and self.kv_transfer in ("nixl", "shm_vm", "shm_map"):
            raise ValueError(
                f"kv_transfer = {self.kv_transfer}: peers can't read a pool in device memory "
                f"(device = {self.engine.device}, kernels = {self.engine.kernels}); "
                "auto, shm, shm_ring, tcp and grpc work"
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
