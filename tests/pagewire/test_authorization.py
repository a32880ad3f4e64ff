"""Who may call what: static tokens with areas, JWTs by JWKS, both read again; on real sockets."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pagewire.config import ConfigError, RouterConfig, load_config
from pagewire.errors import PagewireError, Unauthenticated, Unavailable, from_rpc_error
from pagewire.grants import AREAS_EVERYWHERE, AREAS_ON_ROUTER, area_of
from pagewire.jwks import FileKeys, JwtVerifier, UrlKeys
from pagewire.security import Security
from pagewire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.pagewire.router_stub import running_stub

ISSUER, AUDIENCE = "https://issuer.example", "pagewire"


class Issuer:
    """Signs tokens and publishes its keys."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[str, Any]] = {}

    def add(self, key_id: str, algorithm: str) -> None:
        make = rsa.generate_private_key if algorithm == "RS256" else None
        key = make(public_exponent=65537, key_size=2048) if make else ec.generate_private_key(ec.SECP256R1())
        self.keys[key_id] = (algorithm, key)

    def jwks(self) -> str:
        found = []
        for key_id, (algorithm, key) in self.keys.items():
            of = jwt.algorithms.RSAAlgorithm if algorithm == "RS256" else jwt.algorithms.ECAlgorithm
            found.append(json.loads(of.to_jwk(key.public_key())) | {"kid": key_id, "alg": algorithm, "use": "sig"})
        return json.dumps({"keys": found})

    def token(self, key_id: str, scope: str = "pagewire:inference", **claims: Any) -> str:
        algorithm, key = self.keys[key_id]
        body = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 300, "scope": scope} | claims
        return jwt.encode(body, key, algorithm, headers={"kid": key_id})


@pytest.fixture
def issuer() -> Issuer:
    issuer = Issuer()
    issuer.add("one", "ES256")
    return issuer


def verifier_of(path: Path) -> JwtVerifier:
    return JwtVerifier(FileKeys(path), issuer=ISSUER, audience=AUDIENCE)


class Caller:
    """Calls one method of an area with a token; the outcome is "ok" or the error's code."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def call(self, area: str, token: str) -> PagewireError | None:
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        try:
            if area == "admin":
                stub: Any = admin_pb2_grpc.AdminServiceStub(self._channel)
                stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=metadata, timeout=20)
            elif area == "reflection":
                request = reflection_pb2.ServerReflectionRequest(list_services="")
                stub = reflection_pb2_grpc.ServerReflectionStub(self._channel)
                list(stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=20))
            else:
                stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
                stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata, timeout=20)
        except grpc.RpcError as error:
            return from_rpc_error(error)
        return None

    def outcome(self, area: str, token: str) -> str:
        error = self.call(area, token)
        return "ok" if error is None else error.code.name


def test_a_token_opens_its_areas(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# ours\nroot\n  shop \t inference \nops admin inference\n")
    with running_stub(Security.load(auth_token_file=path)) as (target, _), Caller(target) as caller:
        outcomes = {
            token: [caller.outcome(area, token) for area in ("inference", "admin", "reflection")]
            for token in ("root", "shop", "ops", "nobody", "")
        }
        assert outcomes == {
            "root": ["ok", "ok", "ok"],
            "shop": ["ok", "PERMISSION_DENIED", "ok"],
            "ops": ["ok", "ok", "ok"],
            "nobody": ["UNAUTHENTICATED"] * 3,
            "": ["UNAUTHENTICATED"] * 3,
        }
        refused = caller.call("admin", "shop")
        assert refused is not None
        assert refused.message == "the token opens inference; pagewire.v1.AdminService/GetStatus needs 'admin'"
        (detail,) = refused.details
        assert isinstance(detail, error_details_pb2.ErrorInfo)
        assert (detail.reason, dict(detail.metadata)) == ("AREA_NOT_GRANTED", {"area": "admin"})


@pytest.mark.parametrize(
    ("method", "on_router", "on_worker"),
    [
        ("pagewire.v1.InferenceService/Generate", "inference", "inference"),
        ("inference.GRPCInferenceService/ModelStreamInfer", "inference", "inference"),
        ("vllm.grpc.engine.VllmEngine/Generate", "inference", "internal"),
        ("vllm.grpc.engine.VllmEngine/FlushCache", "admin", "internal"),
        ("vllm.grpc.engine.VllmEngine/SubscribeKvEvents", "admin", "internal"),
        ("pagewire.v1.AdminService/Drain", "admin", "admin"),
        ("pagewire.v1.WorkerService/WatchWorker", "internal", "internal"),
        ("pagewire.v1.Tomorrow/Anything", "internal", "internal"),
        ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None, None),
    ],
)
def test_the_area_of_a_method(method: str, on_router: str | None, on_worker: str | None) -> None:
    assert (area_of(method, AREAS_ON_ROUTER), area_of(method, AREAS_EVERYWHERE)) == (on_router, on_worker)


def test_the_token_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old\n")
    security = Security.load(auth_token_file=path)
    with running_stub(security) as (target, _), Caller(target) as caller:
        assert caller.outcome("inference", "old") == "ok"
        path.write_text("new\nother nonsense\n")
        time.sleep(1.2)
        assert caller.outcome("inference", "old") == "ok", "a file with a mistake changes nothing"
        path.write_text("new\n")
        deadline = time.monotonic() + 30
        while caller.outcome("inference", "new") != "ok":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert caller.outcome("inference", "old") == "UNAUTHENTICATED"
        assert security.own_token == "new"


def test_bad_token_files(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("a\nb everything\n")
    with pytest.raises(ConfigError, match="line 2 grants 'everything', must be of admin, inference, internal"):
        Security.load(auth_token_file=path)
    path.write_text("a inference\n")
    with pytest.raises(ConfigError, match="the first token is what this process sends to its peers"):
        Security.from_config(RouterConfig(model="x", auth_token_file=path))


def test_a_process_keeps_its_own_token_when_the_file_gets_worse(tmp_path: Path) -> None:
    """A client's token must not become what this process sends to its peers."""
    path = tmp_path / "tokens"
    path.write_text("all\n")
    security = Security.from_config(RouterConfig(model="x", auth_token_file=path))
    path.write_text("shop inference\nall\n")
    time.sleep(1.2)
    assert security.own_token == "all"
    path.write_text("newer\nshop inference\n")
    time.sleep(1.2)
    assert security.own_token == "newer"


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
def test_jwts_by_scope(tmp_path: Path, issuer: Issuer, algorithm: str) -> None:
    issuer.add("key", algorithm)
    path = tmp_path / "jwks.json"
    path.write_text(issuer.jwks())
    with running_stub(Security.load(verifier=verifier_of(path))) as (target, _), Caller(target) as caller:
        for scope, outcomes in (
            ("pagewire:inference", ["ok", "PERMISSION_DENIED"]),
            ("openid pagewire:admin pagewire:inference", ["ok", "ok"]),
            ("openid inference", ["PERMISSION_DENIED", "PERMISSION_DENIED"]),
        ):
            token = issuer.token("key", scope)
            assert [caller.outcome(area, token) for area in ("inference", "admin")] == outcomes


async def test_every_way_in_which_a_jwt_can_be_wrong(tmp_path: Path, issuer: Issuer) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(issuer.jwks())
    stranger = Issuer()
    stranger.add("one", "ES256")
    stranger.add("two", "ES256")
    unsigned = jwt.encode(
        {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 300}, None, "none", headers={"kid": "one"}
    )
    symmetric = jwt.encode({"iss": ISSUER}, "k" * 32, "HS256", headers={"kid": "one"})
    verifier = verifier_of(path)
    for token, problem in (
        (issuer.token("one", exp=time.time() - 60), "Signature has expired"),
        (issuer.token("one", iss="https://other.example"), "Invalid issuer"),
        (issuer.token("one", aud="other"), "Audience doesn't match"),
        (issuer.token("one", exp=None), "exp"),
        (stranger.token("one"), "Signature verification failed"),
        (stranger.token("two"), "unknown key .kid 'two'"),
        (unsigned, "signed with 'none', must be RS256 or ES256"),
        (symmetric, "signed with 'HS256', must be RS256 or ES256"),
        ("a.b.c", "not valid"),
    ):
        with pytest.raises(Unauthenticated, match=problem):
            await verifier.areas(token)
    assert await verifier.areas(issuer.token("one", "", scp=["pagewire:internal"])) == set(), "scope wins over scp"
    assert await verifier.areas(issuer.token("one")) == {"inference"}


@asynccontextmanager
async def published(issuer: Issuer) -> AsyncIterator[tuple[str, list[str]]]:
    """(URL, requests so far) of a real HTTP server; without keys it answers 500."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200 if issuer.keys else 500)
            self.end_headers()
            self.wfile.write(issuer.jwks().encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/jwks", requests
    finally:
        await asyncio.to_thread(server.shutdown)
        thread.join()
        server.server_close()
        # The threads that fetched keys end with the loop's executor.
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_keys_of_a_url_are_fetched_again(issuer: Issuer) -> None:
    now = 1000.0
    async with published(issuer) as (url, requests):
        verifier = JwtVerifier(UrlKeys(url, clock=lambda: now), issuer=ISSUER, audience=AUDIENCE)
        await asyncio.gather(*(verifier.areas(issuer.token("one")) for _ in range(5)))
        assert len(requests) == 1, "one fetch for all that wait"
        issuer.add("two", "RS256")
        with pytest.raises(Unauthenticated, match="unknown key"):
            await verifier.areas(issuer.token("two"))
        assert len(requests) == 1, "strangers' tokens don't make it fetch at will"
        now += 11
        assert await verifier.areas(issuer.token("two")) == {"inference"}
        token, issuer.keys = issuer.token("one"), {}
        now += 301
        assert await verifier.areas(token) == {"inference"}, "the URL fails, known keys stay"
        assert len(requests) == 3


async def test_keys_that_cannot_be_had(issuer: Issuer) -> None:
    token, issuer.keys = issuer.token("one"), {}
    async with published(issuer) as (url, _):
        verifier = JwtVerifier(UrlKeys(url), issuer=ISSUER, audience=AUDIENCE)
        with pytest.raises(Unavailable, match="cannot be had: HTTP Error 500"):
            await verifier.areas(token)


def test_a_jwks_file_is_read_again_and_mistakes_are_named(tmp_path: Path, issuer: Issuer) -> None:
    path = tmp_path / "jwks.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"auth_jwks_file = '.*jwks.json': is no JWKS"):
        FileKeys(path)
    path.write_text(issuer.jwks())
    verifier = verifier_of(path)
    issuer.add("later", "ES256")
    path.write_text(issuer.jwks())
    deadline = time.monotonic() + 30
    while True:
        try:
            assert asyncio.run(verifier.areas(issuer.token("later"))) == {"inference"}
            break
        except Unauthenticated:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"auth_jwks_file": "x"}, "need auth_jwt_issuer and auth_jwt_audience"),
        ({"auth_jwt_issuer": "x"}, "need auth_jwt_issuer and auth_jwt_audience"),
        ({"auth_jwks_file": "x", "auth_jwks_url": "https://x"}, "only one of"),
        ({"auth_jwks_url": "file:///etc/passwd"}, "auth_jwks_url = 'file:///etc/passwd'"),
    ],
)
def test_options_that_do_not_fit(flags: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(RouterConfig, {"model": "x", **flags}, None, {})


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
