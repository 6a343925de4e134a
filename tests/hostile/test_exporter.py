"""Clients of the metrics server take a bounded number of the training's descriptors and threads, for a bounded time."""

import contextlib
import os
import socket
import threading
import urllib.error
import urllib.request

import pytest

from bridge_profiling.monitor import server
from bridge_profiling.monitor.outputs import Prometheus
from tests.system.jobs import wait_until


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(server, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(server._Handler, "timeout", 0.2)
    sink = Prometheus(0)
    yield sink.port
    sink.close()
    assert not [thread for thread in threading.enumerate() if "metrics" in thread.name]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("first", "slowly"), [(b"", False), (b"GET / HTTP/1.1\r\nA: b\r\n", False), (b"GET /metrics HT", True)]
)
def test_many_clients_that_stay_take_few_descriptors_and_are_gone_soon(port, first, slowly):
    before, threads = _descriptors(), threading.active_count()
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(48)]

    def send(text: bytes) -> None:
        for client in clients:
            with contextlib.suppress(OSError):  # closed already
                client.send(text)

    def gone() -> bool:
        send(b"x" * slowly)
        return _descriptors() - before - len(clients) <= 0

    send(first)
    few = server.MAX_CONNECTIONS + server.MetricsServer.request_queue_size
    wait_until(lambda: _descriptors() - before - len(clients) <= few, 30, lambda: "connections are unbounded")
    assert threading.active_count() - threads <= server.MAX_CONNECTIONS
    wait_until(gone, 30, lambda: "connections stay open")
    for client in clients:
        client.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(("bind", "host"), [("localhost", "localhost"), ("::1", "[::1]"), ("", "127.0.0.1")])
def test_it_serves_on_addresses_of_both_families(bind, host):
    if bind == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    sink = Prometheus(0, bind)
    with urllib.request.urlopen(f"http://{host}:{sink.port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
    sink.close()
