"""What a process shows to peers and demands of callers: TLS, mTLS, bearer tokens; files are read again on change."""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import grpc

from pagewire.config import ConfigError, ProcessConfig
from pagewire.errors import PermissionDenied, Unauthenticated
from pagewire.grants import AREAS, Grant, read_grants
from pagewire.tls import Tls, TlsFiles, server_credentials
from pagewire.watched import Watched

AUTHORIZATION = "authorization"


class TokenVerifier(Protocol):
    """Checks tokens that are in no file."""

    async def areas(self, token: str) -> frozenset[str]:
        """What the token opens. Raises Unauthenticated saying why, or Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials, fixed or from files. Everything empty means plaintext without authentication."""

    certificate: bytes | None = None
    private_key: bytes | None = None
    authority: bytes | None = None
    tokens: tuple[str, ...] = ()
    # A client verifies servers by the system's authorities.
    system_roots: bool = False
    # These three win over the fixed ones above.
    tls_files: Watched[Tls] | None = None
    token_file: Watched[tuple[Grant, ...]] | None = None
    verifier: TokenVerifier | None = None

    @classmethod
    def load(
        cls,
        *,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        tls_ca: Path | None = None,
        auth_token_file: Path | None = None,
        verifier: TokenVerifier | None = None,
        has_peers: bool = False,
    ) -> Self:
        """Reads the files; raises ConfigError naming the option and the file that cannot be read.

        With `has_peers` the token file must begin with a token that opens everything, now and whenever it changes.
        """
        token_file = None
        if auth_token_file is not None:
            path, read = auth_token_file, _read_peers_grants if has_peers else read_grants
            token_file = Watched("token file", (path,), lambda: read(path))
        return cls(tls_files=TlsFiles(tls_cert, tls_key, tls_ca).watch(), token_file=token_file, verifier=verifier)

    @classmethod
    def from_config(cls, config: ProcessConfig) -> Self:
        """The credentials a configuration names."""
        return cls.load(
            tls_cert=config.tls_cert,
            tls_key=config.tls_key,
            tls_ca=config.tls_ca,
            auth_token_file=config.auth_token_file,
            verifier=_make_verifier(config),
            has_peers=True,
        )

    @property
    def tls(self) -> Tls:
        """The newest certificates; the same object until they change."""
        if self.tls_files is not None:
            return self.tls_files.get()
        return Tls(self.certificate, self.private_key, self.authority)

    @property
    def grants(self) -> tuple[Grant, ...]:
        """Static tokens that are accepted now; the first is this process's own."""
        return self.token_file.get() if self.token_file is not None else tuple(map(Grant, self.tokens))

    @property
    def own_token(self) -> str | None:
        """What this process sends to peers."""
        grants = self.grants
        return grants[0].token if grants else None

    @property
    def serves_tls(self) -> bool:
        """A server with these credentials speaks TLS."""
        return self.tls.certificate is not None

    def server_credentials(self) -> grpc.ServerCredentials:
        """With an authority, callers must show a certificate signed by it (mTLS)."""
        fixed = self.tls
        return server_credentials(lambda: fixed if self.tls_files is None else self.tls_files.get())

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """With today's certificates; None means plaintext."""
        tls = self.tls
        if tls.authority is None and tls.certificate is None and not self.system_roots:
            return None
        return grpc.ssl_channel_credentials(tls.authority, tls.private_key, tls.certificate)

    @property
    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """What a caller sends with each call."""
        return () if self.own_token is None else ((AUTHORIZATION, f"Bearer {self.own_token}"),)

    async def authorize(self, authorization: str, name: str, area: str | None) -> None:
        """Raises Unauthenticated or PermissionDenied unless the `authorization` header opens the area.

        `name` is what was called; area None is open to every valid token.
        """
        grants = self.grants
        if not grants and self.verifier is None:
            return
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("missing bearer token in 'authorization'")
        areas = _areas_of(grants, token)
        if areas is None:
            # A JWT has three parts; anything else is only a wrong static token.
            if self.verifier is None or token.count(".") != 2:
                raise Unauthenticated("wrong bearer token in 'authorization'")
            areas = await self.verifier.areas(token)
        if area is not None and area not in areas:
            opened = ", ".join(sorted(areas)) or "nothing"
            raise PermissionDenied(f"the token opens {opened}; {name} needs {area!r}", area=area)


def _areas_of(grants: tuple[Grant, ...], token: str) -> frozenset[str] | None:
    """None for an unknown token. Every one is compared, each in constant time."""
    sent = token.encode()
    known = [grant.areas for grant in grants if hmac.compare_digest(sent, grant.token.encode())]
    return frozenset().union(*known) & AREAS if known else None


def _with_token(details: Any, token: str | None) -> Any:
    """A copy of the call's details with the token added. (grpc takes any object with these attributes.)"""
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    if token is not None:
        metadata.add(AUTHORIZATION, f"Bearer {token}")
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _TokenInterceptor:
    def __init__(self, token: Callable[[], str | None]) -> None:
        self._token = token


class _UnaryUnary(_TokenInterceptor, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with_token(details, self._token()), request)


class _UnaryStream(_TokenInterceptor, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with_token(details, self._token()), request)


class _StreamUnary(_TokenInterceptor, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
        return await continuation(_with_token(details, self._token()), requests)


class _StreamStream(_TokenInterceptor, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
        return await continuation(_with_token(details, self._token()), requests)


def token_interceptors(security: Security) -> list[grpc.aio.ClientInterceptor]:
    """Client interceptors that send the newest token with each call; none without one, since they cost each message."""
    kinds = (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)
    return [] if security.own_token is None else [kind(lambda: security.own_token) for kind in kinds]


def _make_verifier(config: ProcessConfig) -> TokenVerifier | None:
    """None without a source of keys; raises ConfigError for what is missing or cannot be read."""
    file, url = config.auth_jwks_file, config.auth_jwks_url
    if file is None and url is None:
        return None
    from pagewire.jwks import make_verifier  # here: it imports cryptography, which most processes don't need

    return make_verifier(file, url, config.auth_jwt_issuer, config.auth_jwt_audience)


def _read_peers_grants(path: Path) -> tuple[Grant, ...]:
    """The tokens of a process that sends the first of them to its peers. Raises ConfigError."""
    grants = read_grants(path)
    if grants and grants[0].areas != AREAS:
        raise ConfigError(
            f"auth_token_file = {str(path)!r}: the first token is what this process sends to its peers, so it must "
            "open everything: leave out its areas"
        )
    return grants
