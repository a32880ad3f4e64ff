"""A whole system of real processes for tests: `pagewire up`, its workers' endpoints, and the quiesce barrier."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import grpc
import psutil
import redis

from kvstore.redis_keys import RedisKeys
from pagewire import Client
from pagewire.v1 import admin_pb2, admin_pb2_grpc

READY = re.compile(r"ready\s+(\S+:\d+)")
START_SECONDS = 240
STOP_SECONDS = 90
SETTLE_SECONDS = 25  # below the default lease: a ticket that was forgotten shows


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as AdminService shows it."""

    worker_id: str
    role: int
    endpoint: str
    incarnation: int
    root: bytes


class Cluster:
    """`pagewire up` as a child process. Use as a context manager; `stop` asserts a clean end."""

    def __init__(
        self, model: Path, *flags: str, redis_url: str | None = None, prefill: int = 1, decode: int = 1
    ) -> None:
        self._command = [
            sys.executable, "-m", "pagewire", "up", "--model", str(model), "--port", "0",
            "--prefill", str(prefill), "--decode", str(decode), *flags,
        ]  # fmt: skip
        self._redis_url = redis_url
        if redis_url is not None:
            self._command += ["--redis-url", redis_url]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self.process: subprocess.Popen[str] | None = None
        self.target = ""
        self.ready_line = ""

    def __enter__(self) -> "Cluster":
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=self._stderr, text=True)
        assert self.process.stdout is not None
        killer = _Watchdog(self.process, START_SECONDS)
        for line in self.process.stdout:
            if found := READY.search(line):
                self.ready_line, self.target = line.strip(), found.group(1)
                break
        killer.cancel()
        if not self.target:
            self.process.wait()
            raise AssertionError(f"`pagewire up` did not become ready:\n{self.stderr()}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop(check=kind is None)

    def stderr(self) -> str:
        """What `pagewire up` wrote to stderr so far."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def stop(self, *, check: bool = True) -> None:
        """SIGTERM; asserts exit code 0 and that no child survives."""
        process = self.process
        if process is None:
            self._stderr.close()
            return
        self.process = None
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = -signal.SIGKILL
        _, alive = psutil.wait_procs(children, timeout=30)
        assert process.stdout is not None
        process.stdout.close()
        for survivor in alive:
            survivor.kill()
        if check:
            assert code == 0, f"exit code {code}\n{self.stderr()}"
            assert not alive, f"survivors {alive}"
        self._stderr.close()

    def client(self) -> Client:
        """A client of the router."""
        return Client(self.target)

    def workers(self) -> list[Worker]:
        """Live workers, as the router sees them."""
        with grpc.insecure_channel(self.target) as channel:
            status = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
        return [
            Worker(w.info.worker_id, w.info.role, w.info.endpoint, w.info.incarnation, w.info.fingerprint.root)
            for w in status.workers
            if w.alive
        ]

    def worker_status(self, worker: Worker) -> admin_pb2.WorkerStatus:
        """What the worker says of itself."""
        with grpc.insecure_channel(worker.endpoint) as channel:
            status = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
        return status.workers[0]

    def reset_caches(self) -> None:
        """Makes every worker forget its cached prefixes."""
        self.wait_quiet()
        with grpc.insecure_channel(self.target) as channel:
            admin_pb2_grpc.AdminServiceStub(channel).ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(), timeout=10)
        self.wait_quiet()

    def wait_quiet(self) -> None:
        """Waits until nothing is referenced or queued anywhere and the index equals what workers hold; else fails."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            faults = self._unquiet()
            if not faults:
                return
            if time.monotonic() > deadline:
                raise AssertionError("not quiet: " + "; ".join(faults))
            time.sleep(0.05)

    def _unquiet(self) -> list[str]:
        faults = []
        for worker in self.workers():
            status = self.worker_status(worker)
            for name in ("num_referenced_blocks", "num_requests"):
                if value := getattr(status, name):
                    faults.append(f"{worker.worker_id}: {name} = {value}")
            if status.tickets:
                faults.append(f"{worker.worker_id}: tickets {list(status.tickets)}")
            if status.load.num_running or status.load.num_waiting or status.load.num_transfers:
                faults.append(f"{worker.worker_id}: load {status.load}")
            if self._redis_url is not None:
                faults += self._index_faults(worker)
        return faults

    def _index_faults(self, worker: Worker) -> list[str]:
        with grpc.insecure_channel(worker.endpoint) as channel:
            held = admin_pb2_grpc.AdminServiceStub(channel).ListCachedBlocks(
                admin_pb2.ListCachedBlocksRequest(), timeout=10
            )
        assert self._redis_url is not None
        with redis.Redis.from_url(self._redis_url) as server:
            indexed = server.smembers(RedisKeys(worker.root).blocks(worker.worker_id, worker.incarnation))
        if set(indexed) == set(held.keys):
            return []
        return [f"{worker.worker_id}: holds {len(held.keys)} blocks, the index has {len(indexed)}"]


class _Watchdog:
    """Kills a process that doesn't get ready in time, so that reading its output ends."""

    def __init__(self, process: "subprocess.Popen[str]", seconds: float) -> None:
        import threading

        self._timer = threading.Timer(seconds, process.kill)
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()
        self._timer.join()
