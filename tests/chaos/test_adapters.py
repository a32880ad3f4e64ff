"""Adapters that were loaded at run time, over the CLI, are there again after workers were killed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagewire.cli.app import run
from pagewire.errors import PagewireError
from tests.chaos.system import System
from tests.chaos.test_death import until
from tests.chaos.zygote import Zygote
from tests.tiny_adapters import make_adapter
from tests.valkey import Server

PROMPT = [(7 * i) % 250 + 10 for i in range(41)]
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def adapted(zygote: Zygote, tiny_model: Callable[..., Path], own_redis: Server, tmp_path: Path) -> Iterator[System]:
    model = tiny_model("llama")
    make_adapter(model, tmp_path / "root" / "style")
    flags = ("--kv-cache-memory-bytes", "800000", "--enable-lora", "--lora-root", str(tmp_path / "root"))
    with System.forked(zygote, model, tmp_path, *flags, redis_url=own_redis.url) as system:
        yield system


async def test_they_come_back_with_the_worker(adapted: System, capsys: pytest.CaptureFixture[str]) -> None:
    def adapter(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["adapter", *arguments, "--target", adapted.target])
        told = capsys.readouterr()
        return code, told.out, told.err

    def holders() -> str:
        _, out, _ = adapter("list")
        return next((line for line in out.splitlines() if line.startswith("style")), "")

    assert adapter("load", "style", "nowhere")[0] == 1
    code, _, error = adapter("load", "style", "../..")
    assert (code, error.startswith("error: INVALID_ARGUMENT: adapter = 'style': can't be served")) == (1, True), error
    assert "could be loaded" in adapter("load", "style", "style", "--check")[1]
    assert holders() == ""
    code, out, _ = adapter("load", "style", "style")
    assert (code, out.startswith("style: loaded, rank 4, ")) == (0, True), out
    assert "decode-0, prefill-0" in holders()
    with adapted.client() as client:
        expected = client.complete(PROMPT, model="style", **GREEDY)
        assert list(expected.token_ids) != list(client.complete(PROMPT, model="tiny", **GREEDY).token_ids)
        for victims in (["decode-0"], ["decode-0", "prefill-0"]):
            for name in victims:
                adapted[name].kill()
            adapted.restore()
            await until(lambda: "decode-0, prefill-0" in holders())
            again = client.complete(PROMPT, model="style", **GREEDY)
            assert again.token_ids == expected.token_ids
            if "prefill-0" not in victims:
                assert again.usage.cached_tokens == 40, "the same load: its KV still counts"
        assert adapter("unload", "style")[1] == "style: unloaded from 2 workers\n"
        with pytest.raises(PagewireError, match="'style' is not served here; known models: 'tiny'"):
            client.complete(PROMPT, model="style", **GREEDY)
    code, _, error = adapter("unload", "style")
    assert (code, error) == (1, "error: NOT_FOUND: adapter 'style' is not loaded; loaded are: none\n")
    adapted.wait_quiet()
