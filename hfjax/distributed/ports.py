"""Ports: one to listen on, as JAX's coordinator will, and a free one."""

import os
import socket


def listener(port: int) -> socket.socket:
    """Return a socket that listens where JAX's coordinator will (by default on all addresses)."""
    address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}").rpartition(":")
    host, port = address[0].strip("[]"), int(address[2])
    if host != "::":
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    return _listen_on_all(port)


def _listen_on_all(port: int) -> socket.socket:
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=1024)
    return socket.create_server(
        ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
    )


def free_port() -> int:
    """Return a free port of this machine."""
    with _listen_on_all(0) as sock:
        return sock.getsockname()[1]
