"""The same users before a real system, `pagewire up` with 2P2D and a tiny model, and what it measured of itself.

Of the requests of the measured time every other one says what things cost (`calibration.py`), so under the same load
and at the same time as the others, which are the outcome.
"""

import asyncio
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from bench.kv_fetch import READY, free_ports
from bench.routing.calibration import Costs, Timed, fit, seconds_per_token, unqueued
from bench.routing.outcome import Outcome, Sample
from bench.routing.workers import Machine
from bench.routing.workload import BLOCK, Chat, Users, Workload
from engine.memory import KvLayout
from engine.model_config import load_model_config
from pagewire import AsyncClient
from tests.tiny_models import make_tiny_model

NUM_PREFILL, NUM_DECODE = 2, 2
TIMEOUT = 600.0
STEP_TOKENS = 2048
EVERY = 2
"""Every so-manieth request is compared, the others calibrate."""


@dataclass(slots=True)
class RealRun:
    """One policy on a system of its own; `run` returns what came out, the machine that it says it ran on, and what
    its first tokens cost."""

    workload: Workload
    policy: str
    rate: float
    directory: Path
    seed: int = 0
    arrived: list[tuple[Chat[int], float, "asyncio.Task[Timed]"]] = field(default_factory=list)

    def run(self, warm_up: float, seconds: float) -> tuple[Outcome, Machine, Costs]:
        with self.system() as (target, metrics_port):
            return asyncio.run(self._run(target, metrics_port, warm_up, seconds))

    @contextmanager
    def system(self) -> Iterator[tuple[str, int]]:
        """The router's address, and the first metrics port."""
        model = self.directory / "tiny"
        if not model.exists():
            make_tiny_model("llama", model, max_position_embeddings=8192)
        config = load_model_config(model)
        layout = KvLayout.of(config, BLOCK)
        pool = self.workload.blocks_per_worker(NUM_PREFILL) * layout.block_bytes
        longest = self.workload.system_tokens + self.workload.num_turns * (
            self.workload.question_tokens + self.workload.answer_tokens
        )
        metrics_port = free_ports(1 + NUM_PREFILL + NUM_DECODE)
        command = [
            sys.executable, "-m", "pagewire", "up", "--model", str(model), "--port", "0", "--prefill", str(NUM_PREFILL),
            "--decode", str(NUM_DECODE), "--policy", self.policy, "--kv-fetch", "off", "--block-size", str(BLOCK),
            "--kv-cache-memory-bytes", str(pool), "--max-model-len", str(longest + 2 * BLOCK), "--cpu-threads", "1",
            "--max-num-batched-tokens", str(STEP_TOKENS),
            "--metrics-port", str(metrics_port), "--log-level", "warning",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if found := READY.search(line):
                        break
                else:
                    raise SystemExit("`pagewire up` did not become ready")
                yield found.group(1), metrics_port
            finally:
                process.terminate()
                process.communicate(timeout=60)

    async def _run(
        self, target: str, metrics_port: int, warm_up: float, seconds: float
    ) -> tuple[Outcome, Machine, Costs]:
        client, rng, words = AsyncClient(target), Random(self.seed), Random(self.seed + 1)
        vocab_size = (await client.list_models())[0].vocab_size

        def say(num_tokens: int) -> list[int]:
            return [words.randrange(10, vocab_size - 10) for _ in range(num_tokens)]

        users = Users(self.workload, say)
        clock = asyncio.get_running_loop().time
        begun = clock()
        next_at, measured_from, before, num_warm = begun, begun + warm_up, {}, 0
        while next_at < measured_from + seconds:
            await asyncio.sleep(max(0.0, next_at - clock()))
            if next_at >= measured_from and not before:
                before, num_warm = await asyncio.to_thread(counters, metrics_port), len(self.arrived)
            next_at += rng.expovariate(self.rate)  # in the simulation's order, so that the same users ask
            chat = users.ask(rng)
            self.arrived.append((chat, clock(), asyncio.create_task(self.turn(client, chat, say(1)))))
        await asyncio.sleep(max(0.0, measured_from + seconds - clock()))
        after = await asyncio.to_thread(counters, metrics_port)
        timed = [await task for _, _, task in self.arrived]
        measured = timed[num_warm:]
        await client.close()
        moved = {name: value - before[name] for name, value in after.items()}
        outcome = Outcome.of(
            "real",
            self.policy,
            self.workload.working_set,
            self.rate,
            [each.sample for each in measured[::EVERY]],
            moved["generation_tokens"] / seconds,
        )
        num_steps = max(1.0, moved["prefill_steps"])
        compared = set(map(id, measured[::EVERY]))
        calibrating = [each for each in measured if id(each) not in compared]
        idle = set(map(id, unqueued(timed)))
        costs = fit(
            [each for each in calibrating if id(each) in idle],
            moved["prefill_seconds"] / num_steps,
            moved["prefill_computed"] / num_steps,
        )
        return outcome, self._machine(costs, seconds_per_token(calibrating, self.workload.answer_tokens)), costs

    async def turn(self, client: AsyncClient, chat: Chat[int], end: list[int]) -> Timed:
        """The prompt is whole blocks and one token; with it the answer is whole blocks too."""
        prompt, arrived = chat.said + end, asyncio.get_running_loop().time()
        done = await client.complete(
            prompt,
            max_tokens=self.workload.answer_tokens - 1,
            temperature=0,
            ignore_eos=True,
            timeout=TIMEOUT,
        )
        chat.said = [*prompt, *done.token_ids]
        chat.busy = False
        sample = Sample(done.timing.ttft_ms / 1e3, len(prompt), done.usage.cached_tokens)
        return Timed(arrived, asyncio.get_running_loop().time() - arrived, done.prefill_worker, sample)

    def _machine(self, costs: Costs, step_seconds: float) -> Machine:
        return replace(
            Machine(),
            num_prefill=NUM_PREFILL,
            num_decode=NUM_DECODE,
            decode_pool=1,
            prefill_rate=1 / max(costs.token, 1e-9),
            prefill_step_seconds=costs.step,
            prefill_step_tokens=STEP_TOKENS,
            step_seconds=step_seconds,
            step_per_sequence=0.0,
            overhead_seconds=costs.delay,
        )


def counters(metrics_port: int) -> dict[str, float]:
    """What the workers have done so far, by role: tokens computed, seconds and number of steps."""
    sums: dict[str, float] = {"generation_tokens": 0.0, "prefill_computed": 0.0}
    for number in range(NUM_PREFILL + NUM_DECODE):
        role = "prefill" if number < NUM_PREFILL else "decode"
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port + 1 + number}/metrics", timeout=10) as page:
            text = page.read().decode()

        def value(name: str, text: str = text) -> float:
            found = re.search(rf"^{name}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", text, re.MULTILINE)
            return float(found[1]) if found else 0.0

        sums["generation_tokens"] += value("vllm:generation_tokens_total")
        if role == "prefill":
            sums["prefill_computed"] += value("pagewire:computed_prompt_tokens_total")
        for name, metric in (("seconds", "pagewire:step_seconds_sum"), ("steps", "pagewire:step_seconds_count")):
            sums[f"{role}_{name}"] = sums.get(f"{role}_{name}", 0.0) + value(metric)
    return sums
