"""The matrix once more over real processes: 2P2D, and a migration in the middle of every stream.

Each decode worker is reached through a relay that ends the router's session after a few messages: as if the network
had, but never too late. `test_features.py` has the other paths, in one process.
"""

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from pagewire import AsyncClient
from pagewire.completion import Chunk
from pagewire.sampling import SamplingParams
from tests.chaos.relay import Call, Pass, Refused, Relay
from tests.chaos.system import System
from tests.chaos.zygote import Zygote
from tests.conftest import shared_memory
from tests.matrix.features import FEATURES, PROMPT, Feature, check_equal
from tests.matrix.http_features import HTTP_FEATURES, choices_of, http_answers
from tests.matrix.system import Result, _plain
from tests.ports import free_port

pytestmark = pytest.mark.nightly
NUM_MESSAGES = 3
MIGRATIONS = "pagewire:migrations_total"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The system outlives a test and looks after its processes."""
    before = shared_memory()
    yield
    assert shared_memory() <= before


class Cut:
    """Ends one session, the first that has brought so many messages since `arm`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = -1

    def arm(self) -> None:
        with self._lock:
            self._left = NUM_MESSAGES

    def __call__(self, call: Call, response: bytes) -> Pass:
        if call.method == "Session":
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    raise Refused(grpc.StatusCode.UNAVAILABLE, "the relay cut it")
        return (response,)


@pytest.fixture(scope="module")
def cut() -> Cut:
    return Cut()


@pytest.fixture(scope="module")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def running(cut: Cut, model: Path, http_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with ExitStack() as stack:
        zygote = Zygote()
        stack.callback(zygote.close)
        system = stack.enter_context(System(zygote, model, tmp_path_factory.mktemp("matrix")))
        decoders = []
        for name in ("d0", "d1"):
            relay = stack.enter_context(Relay())
            relay.on_response = cut
            decoders.append(f"127.0.0.1:{relay.port}")
            worker = system.add_worker("decode", name, "--advertise", decoders[-1], "--kv-cache-memory-bytes", "800000")
            worker.port = free_port()
            relay.target = worker.endpoint
        for name in ("p0", "p1"):
            system.add_worker("prefill", name, "--kv-cache-memory-bytes", "800000")
        system.start()
        prefills = ",".join(system[name].endpoint for name in ("p0", "p1"))
        system.add_router("r0", "--prefill-workers", prefills, "--decode-workers", ",".join(decoders),
                          "--http-port", str(http_port))  # fmt: skip
        system.restore()
        yield system
        system.restore()


async def test_through_processes(expected: dict[str, Result], running: System, cut: Cut) -> None:
    async with AsyncClient(running.target) as client:
        for name, feature in FEATURES.items():
            before = running["r0"].metric(MIGRATIONS)
            cut.arm()
            found, last = await _generate(client, feature)
            check_equal(name, found, expected[name])
            assert running["r0"].metric(MIGRATIONS) > before, f"{name}: nothing has migrated"
            # A beam search tells of its first step, which needs no decode.
            assert last.decode_worker in (("",) if feature.beam_search else ("d0", "d1"))
            assert last.prefill_worker in ("p0", "p1")


async def test_over_http(model: Path, running: System, cut: Cut, http_port: int) -> None:
    expected = await http_answers(model)
    (call,) = expected["tool call"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}
    thought = expected["reasoning and a tool call"][0]["message"]
    assert (thought["reasoning_content"], thought["content"], len(thought["tool_calls"])) == ("hm, well", "So. ", 1)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{http_port}/v1/", timeout=60) as client:
        for name, (path, body) in HTTP_FEATURES.items():
            before = running["r0"].metric(MIGRATIONS)
            cut.arm()
            answer = (await client.post(path, json=body)).json()
            assert "choices" in answer, (name, answer)
            assert choices_of(answer) == expected[name], name
            assert running["r0"].metric(MIGRATIONS) > before, f"{name}: nothing has migrated"


async def _generate(client: AsyncClient, feature: Feature) -> tuple[Result, Chunk]:
    result, last = Result(), Chunk()
    async for chunk in _chunks(client, feature):
        if chunk.done:
            last = chunk
            continue
        if chunk.prompt_logprobs:
            assert chunk.prompt_logprobs_start == len(result.prompt_logprobs) + 1
            result.prompt_logprobs += map(_plain, chunk.prompt_logprobs)
            continue
        output = result.choice(chunk.choice)
        assert chunk.index == len(output.token_ids) or not chunk.token_ids
        output.token_ids += chunk.token_ids
        output.text += chunk.text
        output.logprobs += map(_plain, chunk.logprobs)
        if chunk.finish_reason is not None:
            output.finish = chunk.finish_reason.upper()
    return result, last


def _chunks(client: AsyncClient, feature: Feature) -> AsyncIterator[Chunk]:
    given: dict[str, Any] = {name: getattr(feature.params, name) for name in SamplingParams.__dataclass_fields__}
    if (search := feature.beam_search) is not None:
        given |= {"num_beams": search.num_beams, "length_penalty": search.length_penalty}
    return client.generate(
        PROMPT,
        truncate_prompt_tokens=feature.truncate,
        best_of=feature.best_of,
        timeout=60,
        **given,
        **asdict(feature.options),
    )
