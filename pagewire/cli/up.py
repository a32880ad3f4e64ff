"""`pagewire up`: the whole system on one machine, each part in a process of its own."""

import importlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from pagewire.cli.failure import CommandFailed
from pagewire.cli.flags import fields_of, with_flags
from pagewire.cli.plan import Plan, make_plan, with_index
from pagewire.cli.progress import waiting_for
from pagewire.cli.services import ConfigFile
from pagewire.config import ENV_PREFIX, MACHINE_VARIABLES, EngineOptions, RouterConfig, WorkerConfig, to_toml
from pagewire.supervisor import ChildFailed, ChildSpec, Supervisor

START_TIMEOUT_SECONDS = 600.0
DRAIN_SLACK_SECONDS = 5.0

# What differs per process, so that it cannot be set for all of them.
_PER_PROCESS = frozenset({"advertise", "worker_id", "prefill_workers", "decode_workers"})
_COUNT_PANEL = "Processes"


@with_flags(fields_of(EngineOptions, RouterConfig, WorkerConfig), without=_PER_PROCESS)
def up(
    num_prefill: Annotated[
        int,
        typer.Option("--prefill", metavar="N", min=0, max=64, help="Prefill workers.", rich_help_panel=_COUNT_PANEL),
    ] = 1,
    num_decode: Annotated[
        int, typer.Option("--decode", metavar="N", min=1, max=64, help="Decode workers.", rich_help_panel=_COUNT_PANEL)
    ] = 1,
    config: ConfigFile = None,
    **flags: Any,
) -> int:
    """Serve a model on this machine: index, prefill, decode and router.

    --model is a directory, a hub name (owner/name), or 'demo'. Without --redis-url an embedded Valkey holds the index.

    --host and --port are the router's; workers take free ports on 127.0.0.1. With --metrics-port N the router has N,
    the prefill workers N+1 …, the decode workers the ports after those. All parts end with this command.
    """
    plan = make_plan(flags, config, num_prefill, num_decode)
    _check_surroundings(plan)
    # From here on there is something to take down in order.
    stop = threading.Event()
    with (
        _stop_on_signals(stop),
        tempfile.TemporaryDirectory(prefix="pagewire-") as directory,
        _index(plan.router.redis_url, Path(directory)) as index,
    ):
        return _run(with_index(plan, index.url), index, Path(directory), stop)


def _check_surroundings(plan: Plan) -> None:
    """What would fail after seconds of loading is said at once."""
    from pagewire.ports import check_bindable

    check_bindable(plan.router.host, plan.router.port)
    if plan.router.http_port:
        check_bindable(plan.router.host, plan.router.http_port)
    for _, config in plan.configs.values():
        if config.metrics_port:
            check_bindable("127.0.0.1", config.metrics_port)


@dataclass(frozen=True, slots=True)
class Index:
    """The index's server; `is_running` of one that is not ours is always true."""

    url: str
    is_running: Callable[[], bool]


@contextmanager
def _index(url: str | None, directory: Path) -> Iterator[Index]:
    """The given server, checked, or an embedded Valkey that ends with the block."""
    if url is not None:
        _ping(url)
        yield Index(url, lambda: True)
        return
    try:
        # By name, since pagewire may not import kvstore.
        module: Any = importlib.import_module("kvstore.embedded_valkey")
        server = module.EmbeddedValkey.start(directory=directory)
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error}: install 'pagewire[demo]' or give --redis-url") from None
    except (OSError, RuntimeError) as error:
        raise CommandFailed(f"cannot start the embedded Valkey: {error}") from None
    try:
        yield Index(str(server.url), lambda: bool(server.is_running))
    finally:
        server.stop()


def _ping(url: str) -> None:
    import redis

    if url.startswith(("redis+sentinel://", "redis+cluster://")):
        return  # found by the index's own client, which retries
    plain = url.replace("valkeys://", "rediss://", 1).replace("valkey://", "redis://", 1)
    try:
        with redis.Redis.from_url(plain, socket_timeout=3, socket_connect_timeout=3) as connection:
            connection.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise CommandFailed(f"redis_url: no Redis answers there: {reason}") from None


@contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for a drain, the second interrupts it."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(plan: Plan, index: Index, directory: Path, stop: threading.Event) -> int:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENV_PREFIX) or name in MACHINE_VARIABLES
    }
    if plan.take_turns:
        environment["PAGEWIRE_CPU_TURNS"] = str(directory)
    supervisor = Supervisor(directory, environment)
    timeout = plan.router.drain_timeout + DRAIN_SLACK_SECONDS
    try:
        for name, (role, config) in plan.configs.items():
            file = directory / f"{name}.toml"
            file.touch(mode=0o600)
            file.write_text(to_toml(config, show_secrets=True), encoding="utf-8")
            supervisor.start(ChildSpec(name, role, (sys.executable, "-m", "pagewire", role, "--config", str(file))))
        with waiting_for(plan.configs) as show:

            def tick() -> None:
                for child in supervisor.children:
                    show(child.spec.name, child.last_line, child.endpoint is not None)

            endpoint = _wait_until_serving(supervisor, plan, stop, tick)
        if endpoint is not None:
            print(f"ready {endpoint} after {_seconds_since_process_start():.1f} s", flush=True)
            if plan.router.http_port:
                scheme = "http" if plan.router.tls_cert is None else "https"
                print(f"OpenAI's API at {scheme}://{plan.router.host}:{plan.router.http_port}/v1", flush=True)
        while not stop.wait(0.1):
            supervisor.check()
            if not index.is_running():
                raise CommandFailed("valkey (the embedded index) ended by itself")
    except ChildFailed as failure:
        raise CommandFailed(_describe(failure)) from None
    except TimeoutError as error:
        raise CommandFailed(str(error)) from None
    finally:
        killed = supervisor.stop(("router", "decode", "prefill"), timeout)
    if killed:
        raise CommandFailed(f"{', '.join(killed)} did not stop within {timeout:g} s and had to be killed")
    return 0


def _wait_until_serving(
    supervisor: Supervisor, plan: Plan, stop: threading.Event, tick: Callable[[], None]
) -> str | None:
    """The router's endpoint once it sees every worker; None if told to stop before."""
    # gRPC only after all forks, and while the children load: 0.2 s of CPU that nobody waits for then.
    import pagewire.rpc  # noqa: F401 (fetch_status imports it)
    from pagewire.cli.status import fetch_status
    from pagewire.errors import PagewireError
    from pagewire.security import Security

    if not supervisor.wait_ready(START_TIMEOUT_SECONDS, stopped=stop.is_set, tick=tick):
        return None
    endpoint = next(str(child.endpoint) for child in supervisor.children if child.spec.role == "router")
    target = endpoint.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")
    security = Security.from_config(plan.router)
    deadline = time.monotonic() + 60.0
    wanted = {str(worker.worker_id) for worker in plan.workers.values()}
    alive: set[str] = set()
    reason = ""
    while not stop.is_set():
        supervisor.check()
        try:
            response = fetch_status(target, security)
            alive = {worker.info.worker_id for worker in response.workers if worker.alive}
        except PagewireError as error:
            reason = f": {error.message}"
        if alive >= wanted:
            return endpoint
        if time.monotonic() > deadline:
            missing = ", ".join(sorted(wanted - alive))
            raise TimeoutError(f"the router does not see {missing} after 60 s{reason}")
        tick()
        stop.wait(0.02)
    return None


def _seconds_since_process_start() -> float:
    """Python's own start and all imports included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def _describe(failure: ChildFailed) -> str:
    """One line if the child said what is wrong; otherwise with the end of its log."""
    if failure.error is not None:
        return f"{failure}: {failure.error}"
    return f"{failure}; the end of its log:\n{failure.tail}"
