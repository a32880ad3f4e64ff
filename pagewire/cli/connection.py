"""Flags of the commands that talk to a running system."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pagewire.client import Client
    from pagewire.security import Security

_PANEL = "Connection"

Target = Annotated[
    str,
    typer.Option("--target", metavar="HOST:PORT", envvar="PAGEWIRE_TARGET", help="The router.", rich_help_panel=_PANEL),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="NAME", help="Served model to use.", show_default="the only one", rich_help_panel=_PANEL
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="SECONDS", min=0.001, help="Deadline.", show_default="none", rich_help_panel=_PANEL
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        envvar="PAGEWIRE_TLS_CA",
        help="PEM CA to verify the router; speaks TLS.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        envvar="PAGEWIRE_TLS_CERT",
        help="PEM client certificate (mTLS).",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(
        "--tls-key",
        metavar="FILE",
        envvar="PAGEWIRE_TLS_KEY",
        help="PEM private key of tls-cert.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--auth-token-file",
        metavar="FILE",
        envvar="PAGEWIRE_AUTH_TOKEN_FILE",
        help="File with the bearer token.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]

DEFAULT_TARGET = "127.0.0.1:50051"


def load_security(
    tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, auth_token_file: Path | None
) -> "Security":
    """The credentials the flags name."""
    from pagewire.security import Security

    return Security.load(tls_cert=tls_cert, tls_key=tls_key, tls_ca=tls_ca, auth_token_file=auth_token_file)


def connect(target: str, security: "Security") -> "AbstractContextManager[Client]":
    """A client; the connection is made with the first call."""
    from pagewire.client import Client

    return Client(
        target,
        tls_ca=security.tls.authority,
        tls_cert=security.tls.certificate,
        tls_key=security.tls.private_key,
        token=security.own_token,
    )
