"""What is wrong is said before a model is loaded."""

import socket

import pytest

from engine.worker_setup import check_before_loading
from kvstore.redis_connection import RedisUrlError
from pagewire.config import WorkerConfig, load_config
from pagewire.ports import BindError


def check(**options: str) -> None:
    flags = {"role": "decode", "model": "m", "host": "127.0.0.1", "port": "0", "kv_store_size": "1", **options}
    check_before_loading(load_config(WorkerConfig, flags, None, {}))


def test_the_store_is_not_where_the_index_is() -> None:
    check(redis_url="redis://h", kv_store_url="redis://h/1")
    with pytest.raises(RedisUrlError, match=r"kv_store_url = redis://\*\*\*@h:6379/0 must name another server, or at"):
        check(redis_url="redis://h", kv_store_url="redis://:secret@h:6379/0")


def test_a_bad_url_is_named() -> None:
    with pytest.raises(RedisUrlError, match="bad Redis URL 'redis://h:x'"):
        check(redis_url="redis://h", kv_store_url="redis://h:x")


def test_a_taken_port_of_the_transfer_plane_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=f"port {port} is in use"):
            check(kv_store_url="redis://h", kv_transfer_port=str(port))
        check(kv_store_url="redis://h", kv_transfer_port=str(port), kv_transfer="grpc")
