"""The gateway's socket: bound before anything else starts, so that a taken port is one line."""

import errno
import socket

from gateway.embedded.errors import ServeRefused

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ServeRefused with what to do.

    It listens at once: only then does a second server on the same port fail here.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ServeRefused(f"--host {host} isn't an address of this machine") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ServeRefused(_why(error, host, port)) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The address to call from this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is taken; choose another with --port, or let --port 0 find a "
            "free one"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} isn't an address of this machine"
    return f"{host}:{port} can't be bound ({error.strerror})"
