"""`pagewire router --http-port`: beside gRPC, through SIGTERM, over TLS, and refusals to start in one line."""

import asyncio
import json
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from pagewire import AsyncClient, PagewireError
from tests.ports import free_port
from tests.router.http.serving import COMPLETIONS, parse_events
from tests.router.scripted_workers import Script, ScriptedDecode
from tests.router.system import PROMPT, eventually, wanted
from tests.router.test_main import a_router, launch
from tests.tiny_tokenizers import byte_level, write_model_directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny", byte_level(), vocab_size=300)


@asynccontextmanager
async def a_decode(delay: float = 0.0) -> AsyncIterator[ScriptedDecode]:
    decode = ScriptedDecode(script=Script(delay=delay))
    await decode.start()
    try:
        yield decode
    finally:
        await decode.kill()


async def healthy(client: httpx2.AsyncClient) -> bool:
    return (await client.get("/health")).status_code == 200


async def is_reachable(grpc: AsyncClient) -> bool:
    """On a busy machine the first connections time out (200 ms each, pagewire/rpc.py)."""
    try:
        await grpc.list_models()
    except PagewireError:
        return False
    return True


async def test_both_apis_and_a_drain(model: Path) -> None:
    async with a_decode(delay=0.02) as decode:
        port = free_port()
        flags = ("--decode-workers", decode.endpoint, "--http-port", str(port))
        async with (
            a_router(model, *flags) as (process, target),
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            await eventually(lambda: healthy(client))
            async with AsyncClient(target) as grpc:
                await eventually(lambda: is_reachable(grpc))
                completion = await grpc.complete(list(PROMPT), max_tokens=5)
            body = {"prompt": list(PROMPT), "max_tokens": 5}
            answer = (await client.post(COMPLETIONS, json=body)).json()
            assert answer["choices"][0]["text"] == completion.text
            body = {"prompt": list(PROMPT), "max_tokens": 60, "stream": True, "return_token_ids": True}
            running = asyncio.create_task(client.post(COMPLETIONS, json=body))
            await eventually(lambda: decode.num_tokens_sent > 15)
            process.send_signal(signal.SIGTERM)
            *chunks, done = parse_events((await running).text)
            token_ids = [t for chunk in chunks for t in chunk["choices"][0].get("token_ids", [])]
            assert (token_ids, done) == (wanted(60), "[DONE]")
            async with asyncio.timeout(60):
                assert await process.wait() == 0
            assert process.stderr is not None
            assert b"Traceback" not in await process.stderr.read()


async def test_what_outlasts_the_drain_is_cut_short(model: Path) -> None:
    async with a_decode(delay=0.05) as decode:
        port = free_port()
        flags = ("--decode-workers", decode.endpoint, "--http-port", str(port), "--drain-timeout", "0.3")
        async with a_router(model, *flags) as (process, _):
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                await eventually(lambda: healthy(client))
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({"prompt": list(PROMPT), "max_tokens": 100, "stream": True})
            head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            await eventually(lambda: decode.num_tokens_sent > 2)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await process.wait() == 0
            writer.close()
            await eventually(lambda: decode.num_running == 0)


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    """A directory with cert.pem, its own authority, key.pem, and tokens."""
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", "key.pem")
    command = ("openssl", "req", "-x509", *curve, "-out", "cert.pem", "-days", "2", *name)
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "tokens").write_text("secret\n")
    return tmp_path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
@pytest.mark.parametrize("mutual", [False, True])
async def test_the_same_credentials_as_grpc(model: Path, credentials: Path, mutual: bool) -> None:
    certificate, key, port = str(credentials / "cert.pem"), str(credentials / "key.pem"), free_port()
    flags = ["--http-port", str(port), "--tls-cert", certificate, "--tls-key", key,
             "--auth-token-file", str(credentials / "tokens")]  # fmt: skip
    if mutual:
        flags += ["--tls-ca", certificate]
    trust, anonymous = (ssl.create_default_context(cafile=certificate) for _ in range(2))
    trust.load_cert_chain(certificate, key)
    url = f"https://127.0.0.1:{port}/v1/models"
    headers = {"authorization": "Bearer secret"}
    async with a_router(model, *flags):
        async with httpx2.AsyncClient(verify=trust) as client:
            assert (await client.get(url)).status_code == 401
            assert (await client.get(url, headers=headers)).json()["data"][0]["id"] == "tiny"
            with pytest.raises(httpx2.TransportError):
                await client.get(url.replace("https", "http"))
        async with httpx2.AsyncClient(verify=anonymous) as client:
            if not mutual:
                assert (await client.get(url, headers=headers)).status_code == 200
                return
            with pytest.raises(httpx2.TransportError):
                await client.get(url, headers=headers)


async def test_a_port_in_use_ends_it_with_one_line(model: Path) -> None:
    port = free_port()
    async with a_router(model, "--http-port", str(port)):
        process = await launch(model, "--port", "0", "--http-port", str(port))
        _, stderr = await process.communicate()
    assert process.returncode not in (0, None)
    assert f"port {port} is in use" in stderr.decode()
    assert "Traceback" not in stderr.decode()
