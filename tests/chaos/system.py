"""A system of real processes that can be hurt one by one: killed, frozen, restarted on the same port."""

import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import grpc
import psutil

from pagewire.v1 import admin_pb2, admin_pb2_grpc
from tests.chaos.zygote import Child, Zygote
from tests.e2e.cluster import READY, STOP_SECONDS, Cluster, Worker
from tests.ports import free_port

START_SECONDS = 240  # several start at a time, on a machine that may be busy with other things
RESTORE_SECONDS = 90  # with a second try less than pytest's timeout, after which nothing more is reported
BLOCK_SIZE = 4
MAX_BATCHED_TOKENS = 16
WORKER_FLAGS = (
    "--dtype", "float32", "--kernels", "reference", "--block-size", str(BLOCK_SIZE), "--cpu-threads", "1",
    "--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--max-num-seqs", "8", "--served-model-name", "tiny",
)  # fmt: skip


class Service:
    """`pagewire prefill|decode|router` as a process; it keeps its port over restarts."""

    def __init__(self, zygote: Zygote, role: str, name: str, directory: Path, flags: Iterable[str]) -> None:
        self._zygote = zygote
        self.role = role
        self.name = name
        self.port = free_port()
        self.metrics_port = free_port()
        self._flags = (*flags, "--metrics-port", str(self.metrics_port))
        self._log = directory / f"{name}.log"
        self._out = directory / f"{name}.out"
        self._process: Child | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Starts the process; `wait_ready` waits for it."""
        self._out.write_bytes(b"")  # the ready line of an earlier life
        self._process = self._zygote.start([self.role, "--port", str(self.port), *self._flags], self._out, self._log)

    def wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while (found := READY.search(self._out.read_text())) is None:
            assert self._process.poll() is None, f"{self.name} ended at start:\n{self.log()}"
            assert time.monotonic() < deadline, f"{self.name} did not become ready:\n{self.log()}"
            time.sleep(0.02)
        self.port = self.port or int(found.group(1).rsplit(":", 1)[1])

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def metric(self, name: str, timeout: float = 5.0, **labels: str) -> float:
        """A metric of this process, summed over its other labels."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=timeout) as response:
            lines = response.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if re.match(rf"{name}(\{{|\s)", line) and all(each in line for each in wanted)
        )

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: its sockets stay open and nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def nice(self, value: int) -> None:
        """Lets others go first when the CPUs are busy."""
        psutil.Process(self.pid).nice(value)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_SECONDS)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None


class System(Cluster):
    """Services by name. Questions about the whole go to the first router that was added."""

    def __init__(self, zygote: Zygote, model: Path, directory: Path, redis_url: str | None = None) -> None:
        self._zygote = zygote
        self.model = model
        self.services: dict[str, Service] = {}
        self._directory = directory
        self._redis_url = redis_url

    def __enter__(self) -> "System":
        return self

    def __exit__(self, *error: object) -> None:
        for service in self.services.values():
            service.kill()

    def __getitem__(self, name: str) -> Service:
        return self.services[name]

    def add_worker(self, role: str, name: str, *flags: str) -> Service:
        """A worker that is not started yet."""
        return self._add(role, name, ("--worker-id", name, *WORKER_FLAGS, *flags))

    def add_router(self, name: str, *flags: str) -> Service:
        """A router that is not started yet."""
        return self._add("router", name, ("--served-model-name", "tiny", *flags))

    def _add(self, role: str, name: str, flags: tuple[str, ...]) -> Service:
        redis = () if self._redis_url is None else ("--redis-url", self._redis_url)
        service = Service(self._zygote, role, name, self._directory, ("--model", str(self.model), *redis, *flags))
        self.services[name] = service
        return service

    def start(self, *names: str) -> None:
        """Starts services (all that do not run) at the same time and waits until they are ready."""
        chosen = [self.services[name] for name in names] or list(self.services.values())
        launched = [service for service in chosen if not service.is_running]
        for service in launched:
            service.launch()
        for service in launched:
            service.wait_ready()
        routers = [each for each in self.services.values() if each.role == "router" and each.is_running]
        if routers:
            self.target = routers[0].endpoint

    @classmethod
    def forked(
        cls,
        zygote: Zygote,
        model: Path,
        directory: Path,
        *flags: str,
        redis_url: str,
        prefill: int = 1,
        decode: int = 1,
        router: tuple[str, ...] = (),
    ) -> "System":
        """What `pagewire up` starts, without its 3 s of CPU for each process; `flags` are the workers'."""
        system = cls(zygote, model, directory, redis_url)
        for role, num in (("prefill", prefill), ("decode", decode)):
            for number in range(num):
                system.add_worker(role, f"{role}-{number}", *flags)
        system.add_router("router", *router)
        try:
            system.restore()
        except BaseException:
            system.__exit__()
            raise
        return system

    def stop(self, *, check: bool = True) -> None:
        """SIGTERM, the routers first, as `pagewire up` does it; asserts exit codes of 0."""
        for role in ("router", "decode", "prefill"):
            members = [each for each in self.services.values() if each.role == role and each.is_running]
            codes = {each.name: each.terminate() for each in members}
            assert not check or not any(codes.values()), f"exit codes {codes}\n{self.logs()}"

    def restore(self) -> None:
        """Starts what does not run and waits until each router has all workers and nothing is left anywhere."""
        for service in self.services.values():
            if service.is_running:
                service.thaw()
        self.start()
        wanted = {each.name for each in self.services.values() if each.role != "router"}
        deadline = time.monotonic() + RESTORE_SECONDS
        for router in (each.name for each in self.services.values() if each.role == "router"):
            while (alive := self._alive_workers(router)) != wanted:
                assert time.monotonic() < deadline, f"{router} knows {alive}, wanted: {wanted}"
                time.sleep(0.05)
        self.wait_quiet()

    def status(self, name: str) -> admin_pb2.WorkerStatus:
        """What a worker says of itself."""
        service = self.services[name]
        return self.worker_status(Worker(name, 0, service.endpoint, 0, b""))

    def remove(self, name: str) -> None:
        """Forgets a service; it is killed if it runs."""
        self.services.pop(name).kill()

    def router_status(self, name: str) -> admin_pb2.GetStatusResponse:
        """What a router knows: its workers, requests in flight, the index."""
        with grpc.insecure_channel(self.services[name].endpoint) as channel:
            return admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)

    def _alive_workers(self, router: str) -> set[str]:
        return {worker.info.worker_id for worker in self.router_status(router).workers if worker.alive}

    def logs(self) -> str:
        return "\n".join(f"--- {each.name}\n{each.log()[-3000:]}" for each in self.services.values())

    def _unquiet(self) -> list[str]:
        faults = super()._unquiet()
        for worker in self.workers():
            status = self.worker_status(worker)
            if status.load.num_free_blocks != status.info.num_blocks:
                faults.append(f"{worker.worker_id}: {status.load.num_free_blocks} of {status.info.num_blocks} free")
            if status.load.num_held_blocks:
                faults.append(f"{worker.worker_id}: {status.load.num_held_blocks} blocks held by tickets")
        return faults
