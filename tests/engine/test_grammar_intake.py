"""Requests that wait for their grammar: added when it is there, and their blocks given back however that ends."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from engine.errors import RequestRefused
from engine.grammar_intake import GrammarIntake
from engine.request import EngineRequest
from pagewire.grammar import GrammarError
from pagewire.sampling import SamplingParams, StructuredOutput

REQUEST = EngineRequest("r", (1, 2), SamplingParams(structured_output=StructuredOutput("regex", "[a-z]+")))


class World:
    """Engine, its grammars and its loop in one, as the intake sees them."""

    def __init__(self) -> None:
        self.grammars = self
        self.may_compile = threading.Event()
        self.error: Exception | None = None
        self.refuses = False
        self.added: list[EngineRequest] = []
        self.failed: list[tuple[list[str], str, str]] = []
        self.released: list[str] = []

    def check(self, request: EngineRequest) -> None:
        if self.refuses:
            raise RequestRefused("prompt", "too long")

    def compile(self, structure: StructuredOutput) -> str:
        assert self.may_compile.wait(60)
        if self.error is not None:
            raise self.error
        return structure.value

    def release_adopted(self, request: EngineRequest) -> None:
        self.released.append(request.request_id)

    def add(self, request: EngineRequest) -> None:
        self.added.append(request)

    def fail(self, request_ids: list[str], message: str, *, field: str = "") -> None:
        self.failed.append((request_ids, message, field))


@pytest_asyncio.fixture
async def world() -> AsyncIterator[tuple[World, GrammarIntake]]:
    world: Any = World()
    intake = GrammarIntake(world, world)
    yield world, intake
    world.may_compile.set()
    await intake.cancel_all()
    intake.close()


async def until_done(intake: GrammarIntake) -> None:
    await asyncio.gather(*intake._tasks, return_exceptions=True)
    await asyncio.sleep(0)


async def test_a_request_is_added_with_its_grammar(world: tuple[World, GrammarIntake]) -> None:
    seen, intake = world
    intake.add(REQUEST)
    await asyncio.sleep(0)
    assert not seen.added
    seen.may_compile.set()
    await until_done(intake)
    assert [(each.request_id, each.grammar) for each in seen.added] == [("r", "[a-z]+")]
    assert not seen.released


async def test_what_can_never_run_is_refused_before_anything_is_compiled(world: tuple[World, GrammarIntake]) -> None:
    seen, intake = world
    seen.refuses = True
    with pytest.raises(RequestRefused):
        intake.add(REQUEST)
    assert seen.released == ["r"]
    assert not intake._tasks


@pytest.mark.parametrize(
    ("error", "field"), [(GrammarError("bad"), "params.structured_output.regex"), (RuntimeError("a bug"), "")]
)
async def test_a_grammar_that_does_not_compile_fails_its_request(
    world: tuple[World, GrammarIntake], error: Exception, field: str
) -> None:
    seen, intake = world
    seen.error = error
    seen.may_compile.set()
    intake.add(REQUEST)
    await until_done(intake)
    assert seen.failed == [(["r"], str(error), field)]
    assert (seen.added, seen.released) == ([], ["r"])


async def test_a_cancelled_request_is_neither_added_nor_failed(world: tuple[World, GrammarIntake]) -> None:
    seen, intake = world
    for request_id in ("r", "s"):
        intake.add(replace(REQUEST, request_id=request_id))
    await asyncio.sleep(0)
    intake.cancel("r")
    intake.cancel("unknown")
    seen.may_compile.set()
    await until_done(intake)
    assert [each.request_id for each in seen.added] == ["s"]
    assert (seen.released, seen.failed) == (["r"], [])
