"""Ports that stay free until a process under test listens on them, however long it takes to start."""

import contextlib
import random
import socket
from pathlib import Path

#: What the system gives to connections, and to whoever asks for any port: one of those may be another's before it is used.
_GIVEN_TO_ANYBODY = Path("/proc/sys/net/ipv4/ip_local_port_range")

_LOWEST = 15_000


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody."""
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """As many of them, all different."""
    end = int(_GIVEN_TO_ANYBODY.read_text().split()[0])
    assert end > _LOWEST + 1000, f"this system gives away ports from {end} on"
    found: list[int] = []
    # Not the tests' seed: several processes of theirs choose at once.
    for port in random.SystemRandom().sample(range(_LOWEST, end), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"of 1000 ports only {len(found)} are free")
