"""JSON Web Tokens of callers, checked with the issuer's published keys (JWKS, RFC 7517) from a file or a URL.

Needs `pagewire[auth]`. Accepted: RS256 and ES256, with `exp`, the configured `iss` and `aud`. The areas (grants.py) are
the claims `scope` (a text with spaces, RFC 8693) or `scp` (a list): `pagewire:inference`, `pagewire:admin`, …
"""

import asyncio
import logging
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pagewire.config import ConfigError
from pagewire.errors import Unauthenticated, Unavailable
from pagewire.grants import AREAS
from pagewire.tls import read_file
from pagewire.watched import Watched

try:
    import jwt
except ModuleNotFoundError:  # an extra
    jwt = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "ES256")
SCOPE_PREFIX = "pagewire:"
# Clocks of issuer and router may differ by this many seconds.
LEEWAY = 30.0
# Keys of a URL are fetched again after this many seconds, and for an unknown key id, but not more often than that.
REFRESH_SECONDS, SHORTEST_REFRESH = 300.0, 10.0
FETCH_TIMEOUT = 5.0
MAX_JWKS_BYTES = 1 << 20

Keys = dict[str, Any]


class KeySource(Protocol):
    """Where keys come from."""

    async def keys(self, key_id: str) -> Keys:
        """By key id; a source may look again if `key_id` is not among them. Raises Unavailable."""
        ...


class FileKeys:
    """A JWKS file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        def read() -> Keys:
            return parse_keys(read_file(path, "auth_jwks_file") or b"", f"auth_jwks_file = {str(path)!r}")

        self._file = Watched("JWKS file", (path,), read)

    async def keys(self, key_id: str) -> Keys:
        return self._file.get()


class UrlKeys:
    """A JWKS URL. Keys that were fetched once stay in use while the URL cannot be reached."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._keys: Keys = {}
        self._tried_at: float | None = None
        self._problem = ""
        self._lock = asyncio.Lock()

    async def keys(self, key_id: str) -> Keys:
        # Who has a key goes on with it while another fetches.
        if self._is_due(key_id) and not (key_id in self._keys and self._lock.locked()):
            async with self._lock:
                if self._is_due(key_id):
                    await self._fetch()
        if not self._keys:
            raise Unavailable(f"the keys that tokens are checked with cannot be had: {self._problem}")
        return self._keys

    def _is_due(self, key_id: str) -> bool:
        if self._tried_at is None:
            return True
        age = self._clock() - self._tried_at
        return age >= (REFRESH_SECONDS if key_id in self._keys else SHORTEST_REFRESH)

    async def _fetch(self) -> None:
        try:
            content = await asyncio.to_thread(_download, self._url)
            self._keys = parse_keys(content, f"auth_jwks_url = {self._url!r}")
        except (OSError, ValueError) as error:
            self._problem = str(error)
            logger.warning("no keys from %s: %s", self._url, error)
        else:
            logger.info("%d keys from %s", len(self._keys), self._url)
        finally:
            self._tried_at = self._clock()


class JwtVerifier:
    """Checks tokens. Raises ConfigError at once if the extra is missing."""

    def __init__(self, source: KeySource, *, issuer: str, audience: str) -> None:
        self._source = source
        self._issuer = issuer
        self._audience = audience

    async def areas(self, token: str) -> frozenset[str]:
        """What the token opens. Raises Unauthenticated saying why, or Unavailable."""
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in ALGORITHMS:
                raise Unauthenticated(
                    f"the token is signed with {header.get('alg')!r}, must be {' or '.join(ALGORITHMS)}"
                )
            key_id = str(header.get("kid", ""))
            key = (await self._source.keys(key_id)).get(key_id)
            if key is None:
                raise Unauthenticated(f"the token is signed with an unknown key (kid {key_id[:64]!r})")
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                issuer=self._issuer,
                audience=self._audience,
                leeway=LEEWAY,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.InvalidTokenError as error:
            raise Unauthenticated(f"the token is not valid: {error}") from None
        return _areas(claims)


def make_verifier(file: Path | None, url: str | None, issuer: str | None, audience: str | None) -> JwtVerifier | None:
    """None without a source of keys; raises ConfigError for what is missing or cannot be read."""
    if file is None and url is None:
        return None
    if jwt is None or not jwt.algorithms.has_crypto:
        raise ConfigError("auth_jwks_file and auth_jwks_url need PyJWT with cryptography: install 'pagewire[auth]'")
    assert issuer is not None
    assert audience is not None
    source: KeySource = FileKeys(file) if file is not None else UrlKeys(url or "")
    return JwtVerifier(source, issuer=issuer, audience=audience)


def parse_keys(content: bytes, where: str) -> Keys:
    """The keys by id that sign with one of ALGORITHMS; raises ConfigError."""
    try:
        found = jwt.PyJWKSet.from_json(content.decode()).keys
    except (ValueError, AttributeError, jwt.PyJWTError) as error:
        raise ConfigError(f"{where}: is no JWKS: {error}") from None
    keys = {key.key_id: key for key in found if key.key_id and key.algorithm_name in ALGORITHMS}
    if not keys:
        raise ConfigError(f"{where}: has no key with an id for {' or '.join(ALGORITHMS)}")
    return keys


def _areas(claims: dict[str, Any]) -> frozenset[str]:
    scope = claims.get("scope", claims.get("scp", ""))
    names = scope.split() if isinstance(scope, str) else [name for name in scope if isinstance(name, str)]
    return AREAS & {name.removeprefix(SCOPE_PREFIX) for name in names if name.startswith(SCOPE_PREFIX)}


def _download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT) as response:
        content: bytes = response.read(MAX_JWKS_BYTES + 1)
    if len(content) > MAX_JWKS_BYTES:
        raise ValueError(f"answers with more than {MAX_JWKS_BYTES} bytes")
    return content
