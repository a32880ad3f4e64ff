"""A session carries all of a router's requests in columns; what breaks it ends them; refusals stay per request."""

import asyncio

import grpc
import pytest

from pagewire.errors import from_status
from pagewire.sampling import SamplingParams
from pagewire.v1 import decode_pb2
from tests.decode_svc.harness import Gate, cluster, greedy, random_prompt, reference, until


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


class Session:
    """A router's side of a session: sends commands, puts the columns back together."""

    def __init__(self, stub, first_index=0):
        self._first_index = first_index
        self._commands = asyncio.Queue()
        self.call = stub.Session(self._send())
        self.tokens = {}
        self.finished = set()
        self.accepted = {}
        self.failures = {}
        self.logprobs = {}
        self.num_messages = 0

    async def _send(self):
        while (command := await self._commands.get()) is not None:
            yield command

    def start(self, handle, request, source=None):
        decode = decode_pb2.DecodeRequest(request=request, source=source)
        start = decode_pb2.SessionStart(handle=handle, decode=decode)
        self._commands.put_nowait(decode_pb2.SessionRequest(start=start))

    def cancel(self, handle):
        self._commands.put_nowait(decode_pb2.SessionRequest(cancel=decode_pb2.SessionCancel(handle=handle)))

    def close(self):
        self._commands.put_nowait(None)

    async def read(self):
        async for message in self.call:
            self.num_messages += 1
            reasons = message.finish_reasons or [0] * len(message.handles)
            columns = (message.handles, message.choices, message.indexes, message.token_ids, reasons)
            for handle, choice, index, token_id, reason in zip(*columns, strict=True):
                output = self.tokens.setdefault((handle, choice), [])
                assert index == self._first_index + len(output)
                output.append(token_id)
                if reason:
                    self.finished.add((handle, choice))
            for entry in message.logprobs:
                self.logprobs.setdefault(message.handles[entry.row], []).append(entry.logprobs)
            self.accepted |= {entry.handle: entry.num_cached_tokens for entry in message.accepted}
            self.failures |= {entry.handle: entry for entry in message.failures}


async def test_many_requests_in_one_stream(model):
    work = [(random_prompt(5 + i, i), greedy(4 + i, logprobs=1 if i == 2 else None)) for i in range(5)]
    work.append((random_prompt(7, 9), SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)))
    expected = reference(model, work)
    async with cluster(model) as workers:
        gate = Gate(workers.decode_engine)
        session = Session(workers.decode_stub)
        for handle, each in enumerate(work):
            session.start(handle, workers.request(*each))
        await until(lambda: workers.decode.worker.status().num_requests == len(work))
        gate.open()
        session.close()
        await asyncio.wait_for(session.read(), 30)
        for handle, outputs in enumerate(expected):
            assert [session.tokens[handle, choice] for choice in range(len(outputs))] == outputs
            assert all((handle, choice) in session.finished for choice in range(len(outputs)))
        assert set(session.accepted) == set(range(len(work)))
        assert {handle: len(values) for handle, values in session.logprobs.items()} == {2: 6}
        num_tokens = sum(len(output) for outputs in expected for output in outputs)
        assert session.num_messages <= gate.num_steps + 1 < num_tokens


async def test_with_a_source(model):
    work = (random_prompt(13, 1), greedy(5))
    ((expected,),) = reference(model, [work])
    async with cluster(model) as workers:
        request = workers.request(*work)
        await workers.prefill_all(request)
        session = Session(workers.decode_stub, first_index=1)
        session.start(4, request, workers.source(workers.ticket))
        session.close()
        await session.read()
        assert session.tokens == {(4, 0): expected[1:]}
        assert session.accepted == {4: 0}


async def test_refusals_and_cancels_concern_one_request(model):
    work = (random_prompt(6, 1), greedy(6))
    ((expected,),) = reference(model, [work])
    async with cluster(model) as workers:
        gate = Gate(workers.decode_engine)
        session = Session(workers.decode_stub)
        session.start(1, workers.request(*work))
        session.start(2, workers.request([], greedy(2)))
        session.start(3, workers.request(random_prompt(400, 1), greedy(2)))
        session.start(4, workers.request(random_prompt(6, 2), greedy(50)))
        await until(lambda: workers.decode.worker.status().num_requests == 2)
        session.cancel(4)
        session.cancel(99)
        await until(lambda: workers.decode.worker.status().num_requests == 1)
        gate.open()
        session.close()
        await session.read()
        assert session.tokens[1, 0] == expected
        assert set(session.failures) == {2, 3}
        from google.rpc import status_pb2

        error = from_status(status_pb2.Status.FromString(session.failures[3].status))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "400" in error.message
        assert error.details


async def test_a_broken_session_ends_its_requests_and_no_others(model):
    work = (random_prompt(6, 1), greedy(6))
    expected = reference(model, [work])
    async with cluster(model) as workers:
        gate = Gate(workers.decode_engine)
        broken, other = Session(workers.decode_stub), Session(workers.decode_stub)
        for handle in range(3):
            broken.start(handle, workers.request(random_prompt(8, handle), greedy(100)))
        other.start(0, workers.request(*work))
        await until(lambda: workers.decode.worker.status().num_requests == 4)
        broken.call.cancel()
        await until(lambda: workers.decode.worker.status().num_requests == 1)
        gate.open()
        other.close()
        await other.read()
        assert [[other.tokens[0, 0]]] == expected


async def test_a_handle_used_twice_ends_the_session(model):
    async with cluster(model) as workers:
        gate = Gate(workers.decode_engine)
        session = Session(workers.decode_stub)
        for _ in range(2):
            session.start(1, workers.request(random_prompt(8, 1), greedy(100)))
        with pytest.raises(grpc.aio.AioRpcError, match=r"start\.handle") as error:
            await session.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        session.close()
        gate.open()


async def test_the_queue_is_bounded(model):
    async with cluster(model, max_queued_requests=3) as workers:
        gate = Gate(workers.decode_engine)
        session = Session(workers.decode_stub)
        for handle in range(6):
            session.start(handle, workers.request(random_prompt(8, handle), greedy(3)))
        reading = asyncio.create_task(session.read())
        await until(lambda: len(session.failures) == 3)
        assert all(entry.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] for entry in session.failures.values())
        gate.open()
        session.close()
        await reading
        assert len(session.finished) == 3
