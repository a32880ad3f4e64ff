"""What every path is compared with: each feature alone, in one process."""

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pagewire.text.tokenizer import Tokenizer
from tests.chaos.zygote import Child, Zygote
from tests.decode_svc.harness import make_engine
from tests.matrix.features import FEATURES, text_of, work_of
from tests.matrix.system import Result, in_one_process


@pytest.fixture(scope="package")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="package")
def expected(model: Path) -> dict[str, Result]:
    """Each alone, in one process, without a prefix cache that another has filled."""
    tokenizer = Tokenizer.load(model)
    engine = make_engine(model, enable_prefix_caching=False)
    try:
        found = {}
        for name, feature in FEATURES.items():
            found |= in_one_process(engine, {name: work_of(feature, tokenizer)})
    finally:
        engine.close()
    for name, result in found.items():
        for output in result.choices.values():
            skip = FEATURES[name].options.skip_special_tokens
            output.text = text_of(tokenizer, output, skip_special_tokens=skip)
    return found


class ForkedRank:
    """A rank forked from the zygote, as a RankProcess."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def how_it_ended(self, timeout: float) -> str | None:
        with suppress(TimeoutError):
            code = self._child.wait(timeout)
            return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return None

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


class ForkedRanks:
    """A launcher that saves each rank the 2 s of CPU of its imports."""

    def __init__(self, zygote: Zygote, log: Path) -> None:
        self._zygote = zygote
        self._log = log

    def start(self, rank: int, address: str, token: bytes) -> ForkedRank:
        where = f"{address}:{token.hex()}:{rank}"
        return ForkedRank(self._zygote.start_rank(where, self._log.with_suffix(".out"), self._log))

    def close(self) -> None:
        """The zygote lives on."""


@pytest.fixture(autouse=True)
def forked_ranks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ranks start quickly, if any do: then there is a zygote."""
    if "TP 2" not in request.node.name:
        return
    zygote = request.getfixturevalue("zygote")
    log = tmp_path_factory.mktemp("ranks") / "ranks.log"
    monkeypatch.setattr("engine.parallel.start.ChildProcesses", lambda: ForkedRanks(zygote, log))
