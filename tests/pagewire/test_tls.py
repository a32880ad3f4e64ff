"""TLS and mTLS on real sockets, with certificates made for the test."""

import asyncio
import shutil
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from pagewire import Client, PagewireError, rpc
from pagewire.config import ConfigError
from pagewire.security import Security
from pagewire.tls import TlsFiles
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from tests.certificates import make_authority, make_certificate
from tests.pagewire.router_stub import StubRouter, running_stub
from tests.pagewire.test_cli import one_line_error, pagewire

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@dataclass(frozen=True)
class Certificates:
    """PEM files of an authority, and of a server and a client that it signed."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    directory = tmp_path_factory.mktemp("tls")

    make_authority(directory)
    for name in ("server", "client"):
        make_certificate(directory, name)
    return Certificates(
        *(directory / name for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key"))
    )


def test_tls_server_and_clients(certificates: Certificates) -> None:
    security = Security.load(tls_cert=certificates.server, tls_key=certificates.server_key)
    authority = certificates.authority.read_bytes()
    with running_stub(security) as (target, _):
        with Client(target, tls_ca=authority) as client:
            assert client.complete("x").text == "x"
        for stranger in (Client(target), Client(target, tls=True)):
            with stranger as client, pytest.raises(PagewireError) as caught:
                client.complete("x")
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert pagewire("generate", "x", "--target", target, "--tls-ca", str(certificates.authority)).stdout == "x\n"
        assert one_line_error(pagewire("generate", "x", "--target", target), 1).startswith("UNAVAILABLE: ")


def test_mutual_tls_demands_a_certificate(certificates: Certificates) -> None:
    security = Security.load(
        tls_cert=certificates.server, tls_key=certificates.server_key, tls_ca=certificates.authority
    )
    authority = certificates.authority.read_bytes()
    own = {"tls_cert": certificates.client.read_bytes(), "tls_key": certificates.client_key.read_bytes()}
    with running_stub(security) as (target, _):
        with Client(target, tls_ca=authority, **own) as client:
            assert client.complete("x").text == "x"
        with Client(target, tls_ca=authority) as client, pytest.raises(PagewireError) as caught:
            client.complete("x")
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_processes_with_the_same_credentials_reach_each_other(certificates: Certificates) -> None:
    """What a router and a worker do: each is a server and a client with one configuration."""
    security = Security.load(
        tls_cert=certificates.server, tls_key=certificates.server_key, tls_ca=certificates.authority
    )
    server = rpc.build_server(security=security)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(StubRouter(), server)
    port = rpc.bind(server, "127.0.0.1", 0, security)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}", security=security) as channel:
        response = await inference_pb2_grpc.InferenceServiceStub(channel).ListModels(inference_pb2.ListModelsRequest())
        assert [model.name for model in response.models] == ["echo"]
    await server.stop(None)


def test_unreadable_and_useless_files(certificates: Certificates, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tls_cert = '/nope': No such file or directory$"):
        Security.load(tls_cert=Path("/nope"), tls_key=certificates.server_key)
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    empty = tmp_path / "tokens"
    empty.write_text("\n \n")
    with pytest.raises(ConfigError, match="has no token"):
        Security.load(auth_token_file=empty)
    with pytest.raises(ConfigError, match=r"tls_cert = '.*garbage.pem': is no PEM certificate"):
        Security.load(tls_cert=garbage, tls_key=certificates.server_key)
    with pytest.raises(ConfigError, match=r"tls_key = '.*garbage.pem': is no PEM private key"):
        Security.load(tls_cert=certificates.server, tls_key=garbage)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_certificates_are_read_again_without_a_restart(tmp_path: Path) -> None:
    """A new authority signs a new server certificate: old clients are refused, new ones served; a half-done change
    (a key that does not fit) changes nothing."""
    old = make_authority(tmp_path, "old").read_bytes()
    new = make_authority(tmp_path, "new").read_bytes()
    certificate, key = make_certificate(tmp_path, "server", "old")
    security = Security.load(tls_cert=certificate, tls_key=key)

    def works(authority: bytes) -> bool:
        with Client(target, tls_ca=authority) as client:
            try:
                return client.complete("x").text == "x"
            except PagewireError:
                return False

    with running_stub(security) as (target, _):
        assert works(old)
        assert not works(new)
        (tmp_path / "other").mkdir()
        make_authority(tmp_path / "other")
        key.write_bytes(make_certificate(tmp_path / "other", "server")[1].read_bytes())
        time.sleep(1.2)
        assert works(old), "the pair does not fit, so the old one stays"
        make_certificate(tmp_path, "server", "new")
        until(lambda: works(new))
        assert not works(old)


async def test_a_channel_goes_on_with_new_certificates(tmp_path: Path) -> None:
    """mTLS with a new authority on both sides: the channel that a router keeps for ever reaches the restarted worker,
    and a stream that ran through the change ends well."""
    make_authority(tmp_path, "old")
    make_authority(tmp_path, "new")
    authority = tmp_path / "ca.pem"
    authority.write_bytes((tmp_path / "old.pem").read_bytes())
    certificate, key = make_certificate(tmp_path, "both", "old")
    security = Security.load(tls_cert=certificate, tls_key=key, tls_ca=authority)
    with running_stub(security) as (target, router):
        async with rpc.channel(target, security=security) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert (await stub.ListModels(inference_pb2.ListModelsRequest())).models[0].name == "echo"
            hanging = stub.Generate(inference_pb2.GenerateRequest(text="!hang"))
            assert (await hanging.read()).text == "!"
            before = security.tls
            make_certificate(tmp_path, "both", "new")
            authority.write_bytes((tmp_path / "new.pem").read_bytes())
            until(lambda: security.tls is not before and security.tls.authority == authority.read_bytes())
            for _ in range(3):
                assert (await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=20)).models[0].name == "echo"
            assert (await hanging.read()).text == "h", "it runs where it began"
            hanging.cancel()
        assert router.cancelled.wait(20)


async def test_the_http_api_reads_its_certificates_again(tmp_path: Path) -> None:
    old = make_authority(tmp_path, "old")
    new = make_authority(tmp_path, "new")
    certificate, key = make_certificate(tmp_path, "server", "old")
    context = TlsFiles(certificate, key).watch_context("the HTTP API")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"ok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def works(authority: Path) -> bool:
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=ssl.create_default_context(cafile=str(authority)), server_hostname="localhost"
            )
        except ssl.SSLError:
            return False
        content = await reader.read()
        writer.close()
        await writer.wait_closed()
        return content == b"ok"

    async with server:
        assert await works(old)
        assert not await works(new)
        make_certificate(tmp_path, "server", "new")
        deadline = time.monotonic() + 30
        while not await works(new):
            assert time.monotonic() < deadline
        assert not await works(old)
