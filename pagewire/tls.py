"""Certificates of a process: read from PEM files, checked, and read again when they change."""

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pagewire.config import ConfigError
from pagewire.watched import Watched


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM bytes. With an authority a server demands certificates of its callers (mTLS)."""

    certificate: bytes | None = None
    private_key: bytes | None = None
    authority: bytes | None = None

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """For gRPC; raises ConfigError without certificate and key."""
        if self.private_key is None or self.certificate is None:
            raise ConfigError("a TLS server needs tls_cert and tls_key")
        return grpc.ssl_server_certificate_configuration([(self.private_key, self.certificate)], self.authority)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the certificates are."""

    certificate: Path | None = None
    private_key: Path | None = None
    authority: Path | None = None

    def read(self) -> Tls:
        """Raises ConfigError naming the option and the file."""
        tls = Tls(
            _read_pem(self.certificate, "tls_cert", "CERTIFICATE"),
            _read_pem(self.private_key, "tls_key", "PRIVATE KEY"),
            _read_pem(self.authority, "tls_ca", "CERTIFICATE"),
        )
        if self.certificate is not None and self.private_key is not None:
            # gRPC would say nothing, and let every handshake fail.
            self.server_context()
        return tls

    def server_context(self) -> ssl.SSLContext:
        """For sockets that listen; raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        assert self.certificate is not None
        try:
            context.load_cert_chain(self.certificate, self.private_key)
            if self.authority is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls_cert, tls_key, tls_ca: {error}") from None
        return context

    def watch(self) -> Watched[Tls] | None:
        """None if there is nothing to watch."""
        return Watched("TLS certificates", paths, self.read) if (paths := self._paths()) else None

    def client_context(self) -> ssl.SSLContext:
        """For sockets that dial, verifying as gRPC's channels do: by the authority, else by the system's. Raises
        ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.private_key)
            if self.authority is not None:
                context.load_verify_locations(self.authority)
            else:
                context.load_default_certs()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"tls_cert, tls_key, tls_ca: {error}") from None
        return context

    def watch_context(self, what: str) -> ssl.SSLContext:
        """A context whose handshakes use the newest certificates; the running ones keep theirs. `what`: for the log."""
        newest = Watched(f"TLS certificates of {what}", self._paths(), self.server_context)
        context = self.server_context()

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = newest.get()

        context.sni_callback = choose
        return context

    def _paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.certificate, self.private_key, self.authority) if path is not None)


def server_credentials(current: Callable[[], Tls]) -> grpc.ServerCredentials:
    """gRPC asks `current` at each handshake, from a thread of its own."""
    first = current()
    known = first

    def fetch() -> Any:  # None: nothing new
        nonlocal known
        newest = current()
        if newest is known:
            return None
        known = newest
        return newest.server_configuration()

    return grpc.dynamic_ssl_server_credentials(
        first.server_configuration(), fetch, require_client_authentication=first.authority is not None
    )


def read_file(path: Path | None, option: str) -> bytes | None:
    """Raises ConfigError naming both."""
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option} = {str(path)!r}: {error.strerror}") from None


def _read_pem(path: Path | None, option: str, label: str) -> bytes | None:
    """gRPC says nothing useful about a file of another kind, and only when the first peer connects."""
    content = read_file(path, option)
    if content is not None and re.search(rb"-----BEGIN [A-Z ]*" + label.encode() + b"-----", content) is None:
        raise ConfigError(f"{option} = {str(path)!r}: is no PEM {label.lower()}")
    return content
