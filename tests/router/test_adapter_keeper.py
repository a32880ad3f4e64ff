"""What a router gives workers so that they have the adapters that they should: once, and nothing that is unloaded."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.worker_view import AdapterLabel, AdapterView
from router.adapter_keeper import AdapterKeeper
from tests.decode_svc.harness import until

A = AdapterView(AdapterLabel("a", b"5", 5), 4, "/a", 0, False, False)


class Workers:
    """A fleet whose workers are their own channels."""

    def __init__(self) -> None:
        self.adapters: dict[str, tuple[AdapterView, ...]] = {}
        self.calls: list[tuple[str, str, int]] = []
        self.may_answer = asyncio.Event()

    def workers(self) -> dict[str, Any]:
        return {
            name: SimpleNamespace(
                description=SimpleNamespace(worker_id=name, incarnation=1, model="m"),
                load=SimpleNamespace(adapters=adapters),
                alive=True,
                is_available=True,
                channel=(self, name),
            )
            for name, adapters in self.adapters.items()
        }

    def find(self, worker_id: str, incarnation: int) -> Any:
        return self.workers().get(worker_id)


class Stub:
    def __init__(self, channel: tuple[Workers, str]) -> None:
        self._workers, self._name = channel

    async def LoadAdapter(self, request: admin_pb2.LoadAdapterRequest, timeout: float) -> None:
        self._workers.calls.append((self._name, "load", request.generation))
        await self._workers.may_answer.wait()

    async def UnloadAdapter(self, request: admin_pb2.UnloadAdapterRequest, timeout: float) -> None:
        self._workers.calls.append((self._name, "take back", request.generation))


@pytest.fixture
async def keeper(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[AdapterKeeper, Workers]]:
    monkeypatch.setattr(admin_pb2_grpc, "AdminServiceStub", Stub)
    workers = Workers()
    keeper = AdapterKeeper(workers, "m")  # type: ignore[arg-type]
    yield keeper, workers
    await keeper.close()


@pytest.mark.parametrize("is_seen_first", [False, True])
async def test_what_is_unloaded_while_it_is_given_is_taken_back(
    keeper: tuple[AdapterKeeper, Workers], is_seen_first: bool
) -> None:
    """Also if the worker is seen with it before its answer comes."""
    router, workers = keeper
    workers.adapters = {"p": (A,), "d": ()}
    router.look()
    await until(lambda: workers.calls == [("d", "load", 5)])
    assert router.forget("a")
    workers.adapters = {"p": (), "d": (A,) if is_seen_first else ()}
    router.look()
    workers.may_answer.set()
    await until(lambda: len(workers.calls) > 1)
    assert workers.calls[1:] == [("d", "take back", 5)]
    assert router.complete({}) == {}
    await until(lambda: not router._tasks)
    router.look()
    assert not router._tasks, "nobody lacks it"


async def test_what_is_given_stays_and_is_given_once(keeper: tuple[AdapterKeeper, Workers]) -> None:
    router, workers = keeper
    workers.adapters = {"p": (A,), "d": ()}
    workers.may_answer.set()
    router.look()
    await until(lambda: not router._tasks)
    router.look()  # it has not told of it yet
    workers.adapters = {"p": (A,), "d": (A,)}
    router.look()
    assert (workers.calls, router._tasks) == ([("d", "load", 5)], {})


async def test_who_joins_while_a_load_fails_does_not_keep_it(keeper: tuple[AdapterKeeper, Workers]) -> None:
    """`p` has got it and loses it again, since another worker can't take it; `d` was given it meanwhile."""
    router, workers = keeper
    workers.may_answer.set()
    workers.adapters = {"p": (A,), "d": ()}
    router.look()
    await until(lambda: not router._tasks)
    workers.adapters = {"p": (), "d": (A,)}
    router.look()
    await until(lambda: not router._tasks)
    assert workers.calls == [("d", "load", 5), ("d", "take back", 5)]
    assert router.complete({}) == {}
    router.look()  # it has not told yet that it is gone
    assert not router._tasks
    workers.adapters = {"p": (), "d": ()}
    router.look()
    workers.adapters = {"p": (A,), "d": ()}
    router.look()
    await until(lambda: not router._tasks)
    assert workers.calls[2:] == [("d", "load", 5)], "somebody has loaded it anew"
