"""Plane TCP under both workers: TLS, leases that end, senders out of reach, silent or other than they say."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.transfer.pool_server import PoolServer
from engine.transfer.tcp_read import TcpReceiver
from engine.transfer.tcp_server import TcpServer
from tests.certificates import make_authority, make_certificate
from tests.decode_svc.harness import BLOCK_SIZE, cluster, greedy, random_prompt, reference, until

PROMPT, PARAMS = random_prompt(6 * BLOCK_SIZE + 2, 1), greedy(6)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(model):
    return reference(model, [(PROMPT, PARAMS)])[0][0]


def own_tokens(workers):
    return workers.value(workers.decode, "pagewire:prefill_tokens_on_decode_total")


def plane_of(workers):
    (peer,) = workers.decode.worker.peers.connected()
    return peer.plane.name


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
    """The ticket ends and its blocks are given to somebody else, between the descriptors and the read."""
    receive, loop = TcpReceiver._receive_blocks, asyncio.get_running_loop()
    async with cluster(model, plane="tcp") as workers:
        cache, memory = workers.prefill_engine.kv_cache, workers.prefill_engine.memory

        async def end_the_lease():
            workers.prefill.worker.sender.drop(workers.ticket, "its lease expired")
            cache.reset()
            others = cache.allocate(cache.num_free)
            memory.buffer[others] += 1
            cache.release(others)

        def late(*arguments):
            asyncio.run_coroutine_threadsafe(end_the_lease(), loop).result(30)
            return receive(*arguments)

        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        monkeypatch.setattr(TcpReceiver, "_receive_blocks", late)
        assert await workers.decode_all(request, workers.ticket) == [expected]
        assert own_tokens(workers) == len(PROMPT), "nothing of it was used"
        failed = {
            reason: workers.value(workers.decode, "pagewire:transfer_failures_total", reason=reason)
            for reason in ("generation", "ticket", "checksum")
        }
        assert failed == {"generation": 1, "ticket": 1, "checksum": 0}


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
        await workers.run(random_prompt(5, 3), PARAMS)  # connected
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
        await workers.run(random_prompt(5, 3), PARAMS)
        request = workers.request(PROMPT, PARAMS)
        await workers.prefill_all(request)
        cache = workers.decode_engine.kv_cache
        with monkeypatch.context() as patch:
            patch.setattr(TcpServer, "_answer", lambda *_: None)
            decoding = asyncio.create_task(workers.decode_all(request, workers.ticket))
            await until(lambda: cache.num_referenced == 7)
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)
            await until(lambda: not cache.num_referenced, 5)
        assert await workers.run(PROMPT, PARAMS) == [expected]
        assert plane_of(workers) == "TCP"
