"""The randomized soak: `python -m tests.chaos.soak --minutes 10 --seed 7`. Its last line is the verdict.

2 routers, 2P2D and Redis as real processes; clients with shared prefixes, several choices, seeds, penalties, stop
strings, cancels, deadlines and slow reading. One process of each role at a time is killed, frozen or told to end, and
comes back; Redis is paused, flushed and restarted empty. In the second half one process of each role is at most
frozen, so that its memory can be watched.

Every finished stream equals an engine in this process, token for token and in its text. An error is a fault unless the
client asked for it or its own router was hurt. At the end every pool is full, no ticket, lease or request is left, and
the index is what the workers hold.
"""

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import grpc

from pagewire import AsyncClient
from pagewire.errors import PagewireError
from tests.chaos.oracle import stream
from tests.chaos.soak_report import MemoryWatch, Tally
from tests.chaos.soak_requests import MAX_MODEL_LEN, Draw, Known, draw, make_catalogue
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.tiny_models import make_tiny_model
from tests.valkey import Server

NUM_CLIENTS = 12
# What starts again goes before what runs: it is back soon, and streams are slow enough to be hit.
NICE = 10
CATALOGUE_SIZE = 40
POOL_TOKENS = 1200  # of each worker: three sequences of full length
BYTES_PER_TOKEN = 768
PREFILLS, DECODES, ROUTERS = ("p0", "p1"), ("d0", "d1"), ("r0", "r1")
SPARED = (PREFILLS[0], DECODES[0], ROUTERS[0])
# Told so while its router is killed, drained or started: try again.
# gRPC keeps "connection refused" for all channels of a process until its next attempt.
BACKOFF_SECONDS = 4.0
KNOWN_AGAIN_SECONDS = 60.0
TRY_AGAIN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


class Soak:
    """Load and harm on one system for `seconds`; `tally` has the outcome."""

    def __init__(self, system: System, redis: Server, catalogue: Sequence[Known], seconds: float, seed: int) -> None:
        self.tally = Tally()
        self._system = system
        self._redis = redis
        self._catalogue = catalogue
        self._seed = seed
        now = time.monotonic()
        self._half, self._until = now + seconds / 2, now + seconds
        # When each process was last hurt; in the future while it is.
        self._hurt_at = dict.fromkeys((*PREFILLS, *DECODES, *ROUTERS), 0.0)

    async def run(self) -> None:
        """Everything at once, then the checks of the end."""
        for name in (*PREFILLS, *DECODES):
            self._system[name].nice(NICE)
        loops = [
            self._hurt_role("decode", DECODES, longest_rest=1.5),
            self._hurt_role("prefill", PREFILLS, longest_rest=6.0),
            self._hurt_role("router", ROUTERS, longest_rest=15.0),
            self._hurt_redis(),
            self._watch(),
            *(self._client(number) for number in range(NUM_CLIENTS)),
        ]
        await asyncio.gather(*loops)
        await asyncio.to_thread(self._check_the_end)

    # --- clients ---

    async def _client(self, number: int) -> None:
        rng = self._rng(f"client {number}")
        while time.monotonic() < self._until and not self.tally.faults:
            router = rng.choice(ROUTERS)
            async with AsyncClient(self._system[router].endpoint) as client:
                for _ in range(5):
                    try:
                        await self._request(client, router, draw(rng, self._catalogue))
                    except Exception as error:
                        code = error.code.name if isinstance(error, PagewireError) else ""
                        self.tally.faults.append(f"client {number} at {router}: {type(error).__name__} {code}: {error}")
                        return
                    if time.monotonic() > self._until:
                        return

    async def _request(self, client: AsyncClient, router: str, wanted: Draw) -> None:
        """Runs a request, compares what came, counts how it ended; raises what must not be."""
        known, started = wanted.known, time.monotonic()
        more = wanted.more | ({"stop": [wanted.stop]} if wanted.stop else {})
        running = asyncio.ensure_future(
            stream(client, known.prompt, pause=wanted.pause, timeout=wanted.timeout, **more, **known.options)
        )
        try:
            if wanted.cancel_after is not None:
                done, _ = await asyncio.wait((running,), timeout=wanted.cancel_after)
                if not done:
                    running.cancel()
            result = await running
        except asyncio.CancelledError:
            if wanted.kind != "cancel":
                raise
            self.tally.ends["cancelled"] += 1
        except PagewireError as error:
            router_was_hurt = self._hurt_at[router] > started - BACKOFF_SECONDS
            if wanted.kind == "deadline" and error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.tally.ends["deadline"] += 1
            elif router_was_hurt and error.code in TRY_AGAIN:
                self.tally.ends["its router was hurt"] += 1
                await asyncio.sleep(0.2)
            else:
                raise
        else:
            if fault := known.fault(result, wanted.stop):
                raise AssertionError(fault)
            self.tally.ends[f"right, {wanted.kind}"] += 1

    # --- harm ---

    async def _hurt_role(self, role: str, names: Sequence[str], longest_rest: float) -> None:
        """One process of the role at a time, so that there is always another one."""
        rng = self._rng(role)
        while True:
            await self._sleep(rng.uniform(0.5, longest_rest))
            if self._is_over:
                return
            name, how = rng.choice(names), rng.choice(["kill", "kill", "kill", "freeze", "terminate"])
            if name in SPARED and time.monotonic() > self._half - 10:
                how = "freeze"
            self.tally.hurts[f"{how} {role}"] += 1
            self._hurt_at[name] = math.inf
            try:
                await self._hurt(name, how, rng.uniform(0.2, 8))
                await self._is_known_again(name)
            except Exception as error:
                self.tally.faults.append(f"{how} {name}: {type(error).__name__}: {error}")
                return
            self._hurt_at[name] = time.monotonic()

    async def _is_known_again(self, name: str) -> None:
        """Ends a harm: until the routers that are well see the process, the other one of its role is the only one."""
        role = self._system[name].role
        deadline = time.monotonic() + KNOWN_AGAIN_SECONDS
        for router in [name] if role == "router" else ROUTERS:
            while role == "router" or not self._is_hurt(router):
                with suppress(grpc.RpcError):
                    status = await asyncio.to_thread(self._system.router_status, router)
                    alive = {worker.info.worker_id for worker in status.workers if worker.alive}
                    if alive & set(DECODES) if role == "router" else name in alive:
                        break
                if time.monotonic() > deadline:
                    raise AssertionError(f"{router} does not see it after {KNOWN_AGAIN_SECONDS} s")
                await asyncio.sleep(0.1)

    async def _hurt(self, name: str, how: str, seconds: float) -> None:
        service = self._system[name]
        await asyncio.to_thread(self.tally.read_counters, service)
        if how == "freeze":
            service.freeze()
            try:
                await asyncio.sleep(seconds)
            finally:
                service.thaw()
            return
        if how == "kill":
            await asyncio.to_thread(service.kill)
        elif (code := await asyncio.to_thread(service.terminate)) != 0:
            raise AssertionError(f"exit code {code} after SIGTERM")
        await asyncio.to_thread(self._system.start, name)
        if service.role != "router":
            service.nice(NICE)

    async def _hurt_redis(self) -> None:
        rng = self._rng("redis")
        while True:
            await self._sleep(rng.uniform(3, 12))
            if self._is_over:
                return
            how = rng.choice(["pause", "flush", "restart"])
            self.tally.hurts[f"{how} redis"] += 1
            if how == "restart":
                await asyncio.to_thread(self._redis.kill)
                await asyncio.sleep(rng.uniform(0, 3))
                await asyncio.to_thread(self._redis.restart)
            else:
                words = ("FLUSHALL",) if how == "flush" else ("CLIENT", "PAUSE", rng.randrange(100, 3000))
                await asyncio.to_thread(self._redis.command, *words)

    # --- watching ---

    async def _watch(self) -> None:
        memory: MemoryWatch | None = None
        while not self._is_over:
            await self._sleep(1.0)
            for name in ROUTERS:
                if not self._is_hurt(name):
                    await asyncio.to_thread(self.tally.read_counters, self._system[name])
            if memory is None and time.monotonic() > self._half and not any(map(self._is_hurt, SPARED)):
                memory = MemoryWatch(self._system, SPARED)
            if memory is not None:
                memory.sample()
        if memory is not None:
            memory.check(self.tally)

    def _check_the_end(self) -> None:
        try:
            self._system.restore()
        except AssertionError as error:
            self.tally.faults.append(str(error))
        for service in self._system.services.values():
            self.tally.read_counters(service)
            if "Traceback" in service.log():
                self.tally.faults.append(f"a traceback in the log of {service.name}:\n{service.log()[-3000:]}")
            if service.role == "router" and (num_requests := self._system.router_status(service.name).num_requests):
                self.tally.faults.append(f"{service.name}: {num_requests} requests in flight at the end")

    def _is_hurt(self, name: str) -> bool:
        return self._hurt_at[name] > time.monotonic()

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._until or bool(self.tally.faults)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, min(seconds, self._until - time.monotonic())))

    def _rng(self, who: str) -> random.Random:
        return random.Random(f"{self._seed}/{who}")


def make_system(zygote: Zygote, model: Path, directory: Path, redis_url: str, block_size: int) -> System:
    """2P2D and two routers, not started."""
    system = System(zygote, model, directory, redis_url)
    for role, names in (("prefill", PREFILLS), ("decode", DECODES)):
        for name in names:
            flags = ("--kv-cache-memory-bytes", str(POOL_TOKENS * BYTES_PER_TOKEN), "--block-size", str(block_size),
                     "--max-model-len", str(MAX_MODEL_LEN), "--kv-lease-seconds", "5", "--kv-max-hold-seconds", "5",
                     "--drain-timeout", "4")  # fmt: skip
            system.add_worker(role, name, *flags)
    for name in ROUTERS:
        system.add_router(name, "--drain-timeout", "10", "--migration-limit", "20")
    return system


def run(minutes: float, seed: int, block_size: int = 4, say: Callable[[str], None] = print) -> Tally:
    """The whole thing; says counts and, last, the verdict."""
    say(f"soak: seed {seed}, block size {block_size}, {minutes:g} min")
    with tempfile.TemporaryDirectory(prefix="pagewire-soak-") as name, Server() as server:
        model = make_tiny_model("llama", Path(name) / "model")
        catalogue = make_catalogue(model, random.Random(seed), CATALOGUE_SIZE)
        zygote = Zygote()
        with closing(zygote), make_system(zygote, model, Path(name), server.url, block_size) as system:
            system.restore()
            soak = Soak(system, server, catalogue, 60 * minutes, seed)
            try:
                asyncio.run(soak.run())
            except Exception as error:
                soak.tally.faults.append(f"the soak itself failed: {type(error).__name__}: {error}")
            if soak.tally.faults:
                say(system.logs())
    tally = soak.tally
    for line in tally.lines():
        say(line)
    say(
        f"soak {'FAILED' if tally.faults else 'ok'}: seed {seed}, block size {block_size}, {minutes:g} min, "
        f"{tally.ends.total()} requests, {tally.hurts.total()} hurts, {tally.total('migrations')} migrations, "
        f"{len(tally.faults)} faults"
    )
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--block-size", type=int, default=4)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if arguments.seed is None else arguments.seed
    tally = run(arguments.minutes, seed, arguments.block_size, lambda line: print(line, flush=True))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
