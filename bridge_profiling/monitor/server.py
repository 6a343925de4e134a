"""A small HTTP server for metrics inside a training: bounded connections, each for a bounded time.

A server with a thread for each connection keeps an idle one forever, and takes the training's file descriptors with it.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

#: Connections served at the same time; a further one is closed at once. Prometheus opens one per scrape.
MAX_CONNECTIONS = 16

#: Seconds that a connection may take as a whole, and between two bytes.
MAX_SECONDS, IDLE_SECONDS = 10.0, 5.0

#: How long to wait after a connection could not be accepted: the training may have used up the file descriptors.
_PAUSE_SECONDS = 0.5


class MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """Serves a WSGI application from threads of its own, from construction to `stop`; OSError if the address can't be used."""

    daemon_threads = True
    # The end of a training waits for no client.
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, bind: str, port: int, application: Callable) -> None:
        family, *_, address = socket.getaddrinfo(bind or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        #: When each open connection has to end.
        self._deadlines: dict[socket.socket, float] = {}
        self._lock, self._stopping = threading.Lock(), threading.Event()
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]
        self.set_app(application)
        self._thread = threading.Thread(target=self.serve_forever, name="bridge_profiling metrics", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """Bind without WSGIServer's look-up of the machine's full name, which may hang where no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def stop(self) -> None:
        """Stop serving, and close every connection."""
        self._stopping.set()
        self.shutdown()
        self.server_close()
        self._thread.join()
        self._end_connections(float("inf"))

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. If that fails, wait: it is still there, and would be tried again at once, without end."""
        try:
            return super().get_request()
        except OSError:
            self._stopping.wait(_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection from a thread of its own, or close it if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._deadlines[request] = time.monotonic() + MAX_SECONDS
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection; runs in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """Called every half a second: end what takes too long, however slowly the client still sends."""
        self._end_connections(time.monotonic())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent about a client that went away: standard error is the training's."""

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            known = self._deadlines.pop(request, None) is not None
        if known:
            self._free.release()

    def _end_connections(self, now: float) -> None:
        with self._lock:
            late = [request for request, deadline in self._deadlines.items() if deadline <= now]
        for request in late:
            # Its thread reads the end of the connection, and closes it.
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)


class _Handler(WSGIRequestHandler):
    timeout = IDLE_SECONDS

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing about requests."""
