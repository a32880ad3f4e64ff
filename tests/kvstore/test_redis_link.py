"""A link gives every call its own answer, whatever happens to the calls around it and to the server."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis.exceptions

from kvstore.redis_connection import RedisTarget, close
from kvstore.redis_link import RedisLink
from tests.certificates import make_authority, make_certificate
from tests.kvstore.simulated import until
from tests.ports import free_port
from tests.valkey import Server, is_installed


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest_asyncio.fixture
async def link(server: Server) -> AsyncIterator[RedisLink]:
    client = await RedisTarget.parse(server.url).connect("", 2.0)
    link = await RedisLink.open(client)
    yield link
    await link.close()
    await close(client)


async def test_each_call_has_its_own_answer(link: RedisLink) -> None:
    """Large ones too, and those that are errors."""
    large = os.urandom(3 << 20)
    calls = [link.execute_command("ECHO", large if number == 50 else str(number)) for number in range(100)]
    wrong = link.execute_command("NO-SUCH-COMMAND")
    number = link.execute_command("INCRBY", "n", 7)
    *echoes, error, seven = await asyncio.gather(*calls, wrong, number, return_exceptions=True)
    assert echoes == [large if number == 50 else b"%d" % number for number in range(100)]
    assert isinstance(error, redis.exceptions.ResponseError)
    assert "NO-SUCH-COMMAND" in str(error)
    assert seven == 7


async def test_an_answer_that_nobody_waits_for_is_dropped(server: Server, link: RedisLink) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await link.execute_command("ECHO", "late")
        next_one = asyncio.create_task(link.execute_command("ECHO", "next"))
        await asyncio.sleep(0)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert await next_one == b"next"


async def test_a_server_that_dies_ends_every_call(server: Server, link: RedisLink) -> None:
    calls = [asyncio.create_task(link.execute_command("BLPOP", "nothing", 0)) for _ in range(3)]
    await asyncio.sleep(0.05)
    server.kill()
    for ended in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(ended, redis.exceptions.ConnectionError)
    assert link.is_lost
    with pytest.raises(redis.exceptions.ConnectionError):
        await link.execute_command("PING")


async def test_close_ends_what_waits(server: Server, link: RedisLink) -> None:
    call = asyncio.create_task(link.execute_command("BLPOP", "nothing", 0))
    await asyncio.sleep(0.05)
    await link.close()
    with pytest.raises(redis.exceptions.ConnectionError):
        await call
    await until(lambda: str(server.command("CLIENT", "LIST", "TYPE", "NORMAL")).count("cmd=blpop") == 0)


@pytest.mark.skipif(not (is_installed("redis-server") and shutil.which("openssl")), reason="nobody speaks TLS here")
async def test_tls_a_password_a_database_and_a_server_that_freezes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(make_authority(tmp_path)))
    certificate, key = make_certificate(tmp_path, "server")
    port = free_port()
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no")
    with Server("redis-server", ("--tls-port", str(port), *files)) as server:
        server.command("CONFIG", "SET", "requirepass", "secret")
        client = await RedisTarget.parse(f"rediss://:secret@127.0.0.1:{port}/3").connect("", 2.0)
        link = await RedisLink.open(client)
        large = os.urandom(1 << 20)
        assert await link.execute_command("SET", "key", large) == b"OK"
        assert await link.execute_command("GET", "key") == large
        assert b"db=3" in await link.execute_command("CLIENT", "INFO")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(1.0):
                await link.close()  # nobody answers the good-bye
            await close(client)
        finally:
            os.kill(server.pid, signal.SIGCONT)
