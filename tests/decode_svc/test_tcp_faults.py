"""Plane TCP under both workers: TLS, leases that end, senders out of reach, silent or other than they say."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.transfer.pool_server import PoolServer
from engine.transfer.tcp_read import TcpReceiver
from engine.transfer.tcp_server import TcpServer
from tests.certificates import make_authority, make_certificate
from tests.decode_svc.harness import cluster, until
from tests.decode_svc.plane_faults import (
    PARAMS,
    PROMPT,
    cancel_a_decode,
    check_a_late_read,
    connect,
    own_tokens,
    plane_of,
)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
@pytest.mark.parametrize("is_mutual", [False, True], ids=["TLS", "mTLS"])
async def test_kv_is_as_secret_as_rpcs(model, expected, tmp_path: Path, monkeypatch, is_mutual):
    """No block's bytes are on the wire, nor without a certificate to be had."""
    authority = make_authority(tmp_path)
    certificate, key = make_certificate(tmp_path, "worker")
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(authority))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    tls = {"tls_cert": certificate, "tls_key": key} | ({"tls_ca": authority} if is_mutual else {})
    async with cluster(model, plane="tcp", **tls) as workers:
        assert await workers.run(PROMPT, PARAMS) == [expected]
        assert (plane_of(workers), own_tokens(workers)) == ("TCP", 0)
        server = workers.prefill.worker.pool_server._tcp
        assert server._settings.server_tls is not None
        assert server.num_connections == 1


async def test_what_a_lease_has_ended_for_is_not_taken(model, expected, monkeypatch):
    receive = TcpReceiver._receive_blocks

    def before_each_read(act):
        monkeypatch.setattr(TcpReceiver, "_receive_blocks", lambda *arguments: (act(), receive(*arguments))[1])

    async with cluster(model, plane="tcp") as workers:
        await check_a_late_read(workers, expected, before_each_read)


@pytest.mark.parametrize("change", [{"tcp_port": 1}, {"tcp_secret": b"x" * 32}, {"tcp_port": 0}])
async def test_a_sender_that_cannot_be_reached_is_pulled_from_over_grpc(model, expected, monkeypatch, caplog, change):
    info = PoolServer.info.fget
    monkeypatch.setattr(PoolServer, "info", property(lambda server: replace(info(server), **change)))
    with caplog.at_level("INFO"):
        async with cluster(model, plane="tcp") as workers:
            assert await workers.run(PROMPT, PARAMS) == [expected]
            assert (plane_of(workers), own_tokens(workers)) == ("GRPC", 0)
    assert "plane TCP does not work" in caplog.text
    assert "plane GRPC of TCP, GRPC" in caplog.text


async def test_a_plane_that_dies_while_it_reads_is_replaced(model, expected, monkeypatch):
    async with cluster(model, plane="tcp") as workers:
        await connect(workers)
        server = workers.prefill.worker.pool_server._tcp
        pieces = TcpServer._pieces

        def die(server, slots):
            yield next(pieces(server, slots))
            raise ConnectionError("unplugged")

        monkeypatch.setattr(TcpServer, "_pieces", die)
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        assert await workers.decode_all(request, workers.ticket) == [expected[1:]]
        assert (plane_of(workers), own_tokens(workers)) == ("GRPC", 0)
        await until(lambda: not server.num_connections)


async def test_a_cancel_while_the_sender_is_silent_frees_everything(model, expected, monkeypatch):
    async with cluster(model, plane="tcp") as workers:
        await connect(workers)
        cache = workers.decode_engine.kv_cache
        with monkeypatch.context() as patch:
            patch.setattr(TcpServer, "_answer", lambda *_: None)
            await cancel_a_decode(workers, lambda: cache.num_referenced == 7)
            await until(lambda: not cache.num_referenced, 5)
        assert await workers.run(PROMPT, PARAMS) == [expected]
        assert plane_of(workers) == "TCP"
