"""Can this address be listened on, and if not, why? A plain socket can tell; gRPC cannot."""

import errno
import socket


class BindError(OSError):
    """The address cannot be listened on; the message says why."""


def check_bindable(host: str, port: int) -> None:
    """Binds and closes a socket at host:port; raises BindError."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BindError(f"cannot listen on {address}: {error.strerror}") from None
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BindError(f"cannot listen on {address}: port {port} is in use") from None
        raise BindError(f"cannot listen on {address}: {error.strerror}") from None
