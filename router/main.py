"""The router's process: puts model, index, fleet, pipeline and services together, and takes them apart again."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvstore.redis_index import RedisIndex
from kvstore.routed_stream import RoutedStream
from kvstore.tokenizer_digest import tokenizer_digest
from pagewire import event_loop, rpc
from pagewire.config import RouterConfig
from pagewire.foreign.smg import vllm_engine_pb2_grpc
from pagewire.grants import AREAS_ON_ROUTER
from pagewire.health import HealthServicer
from pagewire.metrics import MetricsServer, RpcMetrics
from pagewire.router_metrics import RouterMetrics
from pagewire.security import Security
from pagewire.tracing import make_tracer
from pagewire.v1 import admin_pb2_grpc, inference_pb2_grpc
from pagewire.vllm_engine import SERVICE_NAME as VLLM_ENGINE
from pagewire.vllm_engine.model_card import ModelCard
from router.adapter_keeper import AdapterKeeper
from router.admin_service import RouterAdminServicer
from router.breaker import Breakers
from router.fleet import Fleet
from router.fleet_placer import FleetPlacer
from router.model import ModelFacts
from router.observer import RequestObserver
from router.oip import service as inference_protocol
from router.pipeline import Pipeline
from router.service import InferenceServicer
from router.services import RetryLimits
from router.tokenizer_guard import TokenizerGuard
from router.vllm_engine.service import RouterVllmEngine

logger = logging.getLogger(__name__)

INFERENCE = "pagewire.v1.InferenceService"
ADMIN = "pagewire.v1.AdminService"
# What clients come with, each for itself; all are SERVING, or not, as one.
APIS = (INFERENCE, VLLM_ENGINE, inference_protocol.SERVICE_NAME)


def run(config: RouterConfig) -> int:
    """Serves until SIGTERM or SIGINT. Raises ModelError, ConfigError or BindError if it cannot start."""
    model = ModelFacts.load(Path(config.model), config.served_model_name)
    event_loop.run(_serve(config, model))
    return 0


async def _serve(config: RouterConfig, model: ModelFacts) -> None:
    security = Security.from_config(config)
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, model.name)
    async with AsyncExitStack() as stack:
        index = RedisIndex(config.redis_url, model=model.name) if config.redis_url is not None else None
        fleet = Fleet(
            (*config.prefill_workers, *config.decode_workers),
            index,
            connect=lambda address: rpc.channel(address, security=security),
        )
        placer = FleetPlacer(
            fleet,
            index,
            model=model.name,
            policy=config.policy,
            local_prefill_max_tokens=config.local_prefill_max_tokens,
            temperature=config.router_temperature,
            may_fetch=config.kv_fetch != "off",
        )
        keeper = AdapterKeeper(fleet, model.name)
        guard = TokenizerGuard(
            tokenizer_digest(Path(config.model)), lambda: None if index is None else index.model_record
        )
        breakers = Breakers(
            on_change=lambda worker_id, state: metrics.breaker(worker_id, None if state is None else state.value)
        )
        tracer = make_tracer(config.otlp_traces_endpoint, "router")
        make_pipeline: Callable[..., Pipeline] = Pipeline
        if tracer is not None:
            from router.tracing import TracedPipeline

            stack.push_async_callback(asyncio.to_thread, tracer.close)
            make_pipeline = partial(TracedPipeline, tracer=tracer)
        pipeline = make_pipeline(
            model,
            placer,
            retry_limits=RetryLimits(max_migrations=config.migration_limit),
            request_timeout=config.request_timeout,
            max_concurrent_requests=config.max_concurrent_requests,
            observer=RequestObserver(metrics),
            breakers=breakers,
            obstacle=guard.check,
            adapters=lambda: keeper.complete(placer.adapters()),
        )
        rpc_metrics = RpcMetrics(registry)
        server = rpc.build_server(security=security, observe=rpc_metrics.observe, areas=AREAS_ON_ROUTER)
        health = rpc.add_health_and_reflection(server, (*APIS, ADMIN))
        admin = RouterAdminServicer(
            pipeline, fleet, index, on_drain=lambda: health.set_all(serving=False), keeper=keeper
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(pipeline), server)
        vllm_engine = RouterVllmEngine(pipeline, fleet, ModelCard(Path(config.model), model.name))
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(vllm_engine, server)
        stack.push_async_callback(vllm_engine.close)
        open_inference = inference_protocol.add_to_server(pipeline, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        port = rpc.bind(server, config.host, config.port, security)
        if config.metrics_port is not None:
            metrics_server = MetricsServer(registry, config.metrics_port, config.host)
            stack.push_async_callback(asyncio.to_thread, metrics_server.close)

        fleet.on_new_incarnation = placer.worker_restarted

        def look_around() -> None:
            processes = fleet.processes()
            breakers.keep_only(processes)
            placer.keep_only(processes)
            keeper.look()
            _fleet_changed(fleet, index, pipeline, metrics, health)

        fleet.on_change = look_around
        _set_serving(health, serving=False)  # until a worker is there
        if index is not None:
            index.on_change = fleet.refresh
            await index.start()
            stack.push_async_callback(index.stop)
        if config.redis_url is not None:
            routed = RoutedStream(config.redis_url, model.name, placer.note_routed_elsewhere)
            placer.on_routed = routed.publish
            await routed.start()
            stack.push_async_callback(routed.stop)
        await fleet.start()
        stack.push_async_callback(fleet.stop)
        stack.push_async_callback(keeper.close)
        pipeline.start()
        stack.push_async_callback(pipeline.close)
        drains = [pipeline.drain, vllm_engine.close, open_inference.close]
        if config.http_port is not None:
            # Not imported by a router that does not need it: 0.1 s.
            from router.http.app import build_app
            from router.http.server import HttpServer

            app = build_app(pipeline, security, registry, rpc_metrics.observe)
            http_server = HttpServer(app, config, config.http_port)
            stack.push_async_callback(http_server.close)
            await http_server.start()
            logger.info("HTTP on %s:%d", config.host, http_server.port)
            drains.append(http_server.drain)

        async def drain() -> None:
            for step in drains:
                await step()

        await rpc.serve(
            server,
            health,
            ready=lambda: print(rpc.ready_line("router", f"{config.host}:{port}"), flush=True),
            drain=drain,
            drain_timeout=config.drain_timeout,
        )


def _fleet_changed(
    fleet: Fleet, index: RedisIndex | None, pipeline: Pipeline, metrics: RouterMetrics, health: HealthServicer
) -> None:
    metrics.num_workers_alive.set(sum(worker.is_available for worker in fleet.workers().values()))
    metrics.index_connected.set(index is not None and index.state == "connected")
    if index is not None:
        metrics.index_blocks.set(index.num_blocks)
        metrics.index_lag.set(index.lag_seconds)
        metrics.index_reads.set(index.num_reads)
    _set_serving(health, serving=pipeline.is_ready and not pipeline.draining)


def _set_serving(health: HealthServicer, *, serving: bool) -> None:
    for name in APIS:
        health.set(name, serving=serving)
