"""Routers telling each other where they sent requests, over a real server that also dies."""

import asyncio

import pytest

from kvstore.routed_stream import Routed, RoutedStream
from tests.kvstore.simulated import chain, until
from tests.valkey import PROGRAMS, Server, is_installed

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_each_router_hears_of_the_others_and_not_of_itself(program: str) -> None:
    if not is_installed(program):
        pytest.skip(f"{program} is not installed")
    heard: dict[str, list[Routed]] = {name: [] for name in "abc"}
    with Server(program) as server:
        streams = {name: RoutedStream(server.url, "tiny", heard[name].append) for name in "ab"}
        streams["c"] = RoutedStream(server.url, "another model", heard["c"].append)
        for stream in streams.values():
            stream.publish(Routed("w", 1))  # nobody listens yet: dropped
            await stream.start()
        await until(lambda: all(stream.is_following for stream in streams.values()))
        said = [Routed("w", 2**64 - 1, tuple(key[:16] for key in chain(3)), number, 2) for number in range(100)]
        for routed in said:
            streams["a"].publish(routed)
        await until(lambda: len(heard["b"]) == 100)
        assert heard == {"a": [], "b": said, "c": []}
        server.command("XADD", "pw:routed:tiny", "*", "something", "else")
        server.kill()
        await until(lambda: not streams["b"].is_following and not streams["a"].is_following)
        streams["a"].publish(said[0])  # old news by the time it could be told
        server.restart()
        await until(lambda: streams["b"].is_following and streams["a"].is_following, 20)
        streams["b"].publish(said[1])
        await until(lambda: heard["a"] == [said[1]])
        assert len(heard["b"]) == 100
        await asyncio.gather(*(stream.stop() for stream in streams.values()))


def test_a_long_prompt_is_cut_and_nonsense_is_named() -> None:
    routed = Routed("w", 1, tuple(key[:16] for key in chain(3000)), 5)
    fields = {name.encode(): value if isinstance(value, bytes) else value.encode() for name, value in
              routed.to_fields().items()}  # fmt: skip
    assert Routed.from_fields(fields).keys == routed.keys[:2048]
    with pytest.raises(ValueError, match="lacks the field b'worker'"):
        Routed.from_fields({})
