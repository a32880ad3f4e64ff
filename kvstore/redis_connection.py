"""Where Redis is: one server, a Sentinel service or a cluster by URL, and a client for the primary that holds a key."""

from contextlib import suppress
from dataclasses import dataclass, field
from posixpath import normpath
from typing import Any, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError

from kvstore.background import to_the_end, within

# What a lost, slow or restarting server raises; the caller drops the client, waits and connects anew.
CONNECTION_ERRORS = (RedisError, OSError, TimeoutError)

_LOOPBACK = ("127.0.0.1", "::1")
_CLOSE_SECONDS = 2.0
_DEFAULT_PORT = 6379
_SENTINEL_PORT = 26379
_SCHEMES = "redis://, rediss://, valkey://, valkeys://, unix://, redis+sentinel:// or redis+cluster://"


class RedisUrlError(ValueError):
    """A Redis URL that cannot be used; the message names it (without its password) and says why."""


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """A parsed URL. `connect` finds the primary each time anew, so after a failover it finds the new one.

    redis://[user:password@]host[:port][/db]          rediss:// with TLS; valkey:// and valkeys:// mean the same
    unix://[user:password@]/path/to/socket[?db=N]
    redis+sentinel://[user:password@]host[:port],host[:port]…/service[/db]
    redis+cluster://[user:password@]host[:port],host[:port]…
    """

    kind: Literal["server", "unix", "sentinel", "cluster"]
    display: str
    nodes: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    tls: bool = False
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.display

    @classmethod
    def parse(cls, url: str) -> "RedisTarget":
        """Reads a URL; raises RedisUrlError."""
        display = url
        try:
            parts = urlsplit(url)
            user_info, at, hosts = parts.netloc.rpartition("@")
            display = parts._replace(netloc=f"***@{hosts}").geturl() if at else url
            if hosts and not at and "@" in url:
                display = f"{parts.scheme}://***@{url.rpartition('@')[2]}"
                raise ValueError("'/', '?' and '#' of a user or password must be written as %2F, %3F and %23")
            username, password = _credentials(user_info)
            common: dict[str, Any] = {"display": display, "username": username, "password": password}
            return cls(**common, **_location(parts, hosts))
        except ValueError as error:
            raise RedisUrlError(f"bad Redis URL {display!r}: {error}") from None

    def shares_database(self, other: "RedisTarget") -> bool:
        """Both lead to one database, as far as URLs say: two names of one host, or its socket, look like two."""
        return self.db == other.db and not self._places().isdisjoint(other._places())

    def _places(self) -> set[tuple[str, int, str]]:
        """Of servers, or of a service."""
        if self.kind == "unix":
            return {(normpath(self.path), 0, "")}
        return {("localhost" if host in _LOOPBACK else host, port, self.service) for host, port in self.nodes}

    async def connect(self, key: str, timeout: float) -> Redis:
        """A client for the primary that holds `key` (and whatever shares its hash tag). `timeout` bounds each socket
        operation in seconds. Commands are never retried inside: the caller knows what a repetition means.
        """
        options: dict[str, Any] = {
            "username": self.username,
            "password": self.password,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if self.kind == "unix":
            return Redis(unix_socket_path=self.path, db=self.db, **options)
        if self.kind == "sentinel":
            host, port = await self._sentinel_primary(timeout, options)
            return Redis(host=host, port=port, db=self.db, **options)
        host, port = self.nodes[0] if self.kind == "server" else await self._cluster_primary(key, options)
        return Redis(host=host, port=port, db=self.db, ssl=self.tls, **options)

    async def _sentinel_primary(self, timeout: float, options: dict[str, Any]) -> tuple[str, int]:
        """The first Sentinel that answers knows; they have no password of the server's."""
        asking = {"socket_timeout": timeout, "socket_connect_timeout": timeout, "retry": options["retry"]}
        sentinel = Sentinel(list(self.nodes), sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(self.service)
            return str(host), int(port)
        finally:
            for each in sentinel.sentinels:
                await close(each)

    async def _cluster_primary(self, key: str, options: dict[str, Any]) -> tuple[str, int]:
        """The primary of the key's slot, by the first node that answers. All of a model's keys share one slot, so a
        plain client is enough; when the slot has moved, its commands fail (MOVED) and the caller connects anew.
        """
        problem: Exception = ConnectionError(f"{self} has no nodes")
        for host, port in self.nodes:
            client = Redis(host=host, port=port, **options)
            try:
                return _primary_of(await client.execute_command("CLUSTER", "SLOTS"), key, host)  # type: ignore[no-untyped-call]
            except CONNECTION_ERRORS as error:
                problem = error
            finally:
                await close(client)
        raise problem


def _primary_of(slots: list[list[Any]], key: str, asked: str) -> tuple[str, int]:
    """Reads CLUSTER SLOTS: [first slot, last slot, [host, port, …], replicas …]; an empty host is the one asked."""
    slot = key_slot(key.encode())
    for first, last, primary, *_ in slots:
        if first <= slot <= last:
            return (primary[0] or b"").decode() or asked, int(primary[1])
    raise ConnectionError(f"no node serves slot {slot}")


def _credentials(user_info: str) -> tuple[str | None, str | None]:
    username, colon, password = user_info.partition(":")
    return unquote(username) or None, unquote(password) if colon else None


def _location(parts: SplitResult, hosts: str) -> dict[str, Any]:
    path = [unquote(part) for part in parts.path.split("/") if part]
    match parts.scheme:
        case "redis" | "valkey" | "rediss" | "valkeys":
            if "," in hosts:
                raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
            tls = parts.scheme in ("rediss", "valkeys")
            return {"kind": "server", "nodes": _nodes(hosts, _DEFAULT_PORT), "tls": tls, "db": _db(path)}
        case "unix":
            if not parts.path.strip("/"):
                raise ValueError("the path of the socket is missing")
            db = parts.query.removeprefix("db=") if parts.query else "0"
            return {"kind": "unix", "path": unquote(parts.path), "db": _db([db])}
        case "redis+sentinel":
            if not path:
                raise ValueError("the service's name is missing: redis+sentinel://host:port/service")
            nodes = _nodes(hosts, _SENTINEL_PORT)
            return {"kind": "sentinel", "nodes": nodes, "service": path[0], "db": _db(path[1:])}
        case "redis+cluster":
            if path:
                raise ValueError("a cluster has no databases")
            return {"kind": "cluster", "nodes": _nodes(hosts, _DEFAULT_PORT)}
        case scheme:
            raise ValueError(f"scheme {scheme!r} is unknown; it must be {_SCHEMES}")


def _nodes(hosts: str, default_port: int) -> tuple[tuple[str, int], ...]:
    nodes = []
    for each in hosts.split(","):
        one = urlsplit(f"//{each}")
        if not one.hostname:
            raise ValueError("the host is missing")
        try:
            nodes.append((one.hostname, one.port or default_port))
        except ValueError:
            raise ValueError(f"{each!r} has a bad port") from None
    return tuple(nodes)


def _db(path: list[str]) -> int:
    if len(path) > 1 or (path and not path[0].isdecimal()):
        raise ValueError(f"the database must be one number, not {'/'.join(path)!r}")
    return int(path[0]) if path else 0


def describe(error: Exception) -> str:
    """What went wrong, for a log line; redis-py's repr hides it and some messages are empty."""
    return str(error) or type(error).__name__


async def result(reply: Any) -> Any:
    """Awaits a reply of the asyncio client, whose types redis-py shares with the blocking one."""
    return await reply


async def close(redis: Redis) -> None:
    """Closes the client's connections, all of them, even if the task is cancelled meanwhile. Raises nothing else, and
    does not wait for long: a frozen server takes neither a TLS good-bye nor what is left to send.
    """
    await to_the_end(_close(redis))


async def _close(redis: Redis) -> None:
    pool: Any = redis.connection_pool
    writers = [each._writer for each in (*pool._available_connections, *pool._in_use_connections)]
    with suppress(*CONNECTION_ERRORS):
        await within(_CLOSE_SECONDS, redis.aclose())
    for writer in writers:
        if writer is not None:
            writer.transport.abort()
