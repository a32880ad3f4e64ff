"""The index over a Unix socket, with a password, behind Sentinel through a failover, and on a cluster."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from kvstore.embedded_valkey import EmbeddedValkey, find_server_program
from kvstore.redis_keys import RedisKeys
from tests.kvstore.simulated import RedisBackend, chain, check_equal, until
from tests.ports import free_port
from tests.valkey import Server

pytestmark = pytest.mark.timeout(240)


async def exercise(url: str, root: bytes | None = None) -> None:
    """Publishes, follows, looks up directly, deregisters."""
    backend = RedisBackend(url, root=root)
    await backend.index.start()
    worker, prompt = await backend.worker("w"), chain(6)
    worker.store(prompt)
    worker.evict(prompt[4:])
    assert await backend.depths(prompt) == {"w": 4}
    check_equal(backend)
    await backend.close()


async def test_unix_socket_with_a_password(tmp_path: Path) -> None:
    path = tmp_path / "v.sock"
    with Server(arguments=("--unixsocket", str(path), "--requirepass", "secret")) as server:
        await exercise(f"unix://:secret@{path}")
        await exercise(f"redis://:secret@127.0.0.1:{server.port}/1")


async def test_a_cluster_is_followed_to_the_node_of_the_slot() -> None:
    """Two primaries: whichever has the model's slot, `pw:models` may lie on the other."""
    buses = free_port(), free_port()  # by itself a port is the server's and 10000, where others' connections may lie
    with Server(arguments=cluster_node(buses[0])) as first, Server(arguments=cluster_node(buses[1])) as second:
        first.command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        second.command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        second.command("CLUSTER", "SET-CONFIG-EPOCH", 2)
        first.command("CLUSTER", "MEET", "127.0.0.1", second.port, buses[1])
        for server in (first, second):
            await until(lambda server=server: b"cluster_state:ok" in as_bytes(server.command("CLUSTER", "INFO")))
        for half in (0, 1, 0, 1):
            root = next(root for root in iter(lambda: os.urandom(32), b"") if slot_of(root) // 8192 == half)
            await exercise(f"redis+cluster://127.0.0.1:{first.port},127.0.0.1:{second.port}", root)
        counts = [server.command("DBSIZE") for server in (first, second)]
        assert all(isinstance(count, int) and count > 0 for count in counts)


def cluster_node(bus: int) -> tuple[str, ...]:
    return "--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", str(bus)


def slot_of(root: bytes) -> int:
    return int(key_slot(RedisKeys(root).prefix.encode()))


def as_bytes(reply: object) -> bytes:
    """CLUSTER INFO comes as a mapping or as text, by client version."""
    if isinstance(reply, dict):
        return b"\n".join(f"{name}:{value}".encode() for name, value in reply.items())
    return reply if isinstance(reply, bytes) else str(reply).encode()


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[tuple[Server, Server, int]]:
    """A primary, a replica, and a Sentinel's port."""
    with contextlib.ExitStack() as stack:
        primary = stack.enter_context(Server())
        replica = stack.enter_context(Server(arguments=("--replicaof", "127.0.0.1", str(primary.port))))
        wait_for_sync(replica)
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"sentinel monitor main 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
        )
        server = EmbeddedValkey.start(program=[find_server_program(), str(config), "--sentinel"])
        stack.callback(server.stop)
        yield primary, replica, server.port


def wait_for_sync(replica: Server) -> None:
    deadline = time.monotonic() + 60
    with redis.Redis(port=replica.port) as client:
        while client.info("replication")["master_link_status"] != "up":
            assert time.monotonic() < deadline
            time.sleep(0.05)


async def test_sentinel_failover_loses_nothing_in_the_end(sentinel: tuple[Server, Server, int]) -> None:
    primary, replica, port = sentinel
    backend = RedisBackend(f"redis+sentinel://127.0.0.1:{port}/main")
    await backend.index.start()
    worker, prompt = await backend.worker("w"), chain(30)
    worker.store(prompt[:10])
    assert await backend.depths(prompt) == {"w": 10}
    await until(lambda: b"slave" in str(sentinel_info(port)).encode(), 15)
    primary.kill()
    worker.store(prompt[10:])
    assert backend.index.lookup(prompt) == {"w": 10}
    await backend.settle(40)
    assert await backend.depths(prompt) == {"w": 30}
    check_equal(backend)
    assert replica.command("EXISTS", f"pw:{{{backend.root[:16].hex()}}}:worker:w") == 1
    await backend.close()


def sentinel_info(port: int) -> object:
    with redis.Redis(port=port) as client:
        return client.execute_command("SENTINEL", "REPLICAS", "main")
