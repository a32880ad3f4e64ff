"""An engine that has died fails nobody's request: its worker says UNAVAILABLE, so that routers go elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.engine import Engine
from engine.errors import EngineDied
from tests.decode_svc.harness import cluster, greedy, random_prompt


class Dies:
    """A runner that has lost a rank."""

    def __init__(self, engine: Engine) -> None:
        engine._runner = self

    def execute(self, schedule: Any) -> Any:
        raise EngineDied("rank 1 has died: signal SIGKILL")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_its_requests_are_for_other_workers(tiny_model: Callable[..., Path], role: str) -> None:
    async with cluster(tiny_model("llama")) as workers:
        request = workers.request(random_prompt(9, 1), greedy(3))
        engine = workers.prefill_engine if role == "prefill" else workers.decode_engine
        Dies(engine)
        call = workers.prefill_all(request) if role == "prefill" else workers.decode_all(request, None)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "the engine has died: rank 1 has died: signal SIGKILL" in str(refused.value.details())
        assert isinstance(engine.death.exception(0), EngineDied)
