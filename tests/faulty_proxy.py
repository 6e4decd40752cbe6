"""An HTTP proxy in front of an S3 server that breaks some of its answers."""

from __future__ import annotations

import collections
import contextlib
import http.client
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Fault = Callable[["Exchange"], None]
Choice = Callable[[str, str], Fault | None]
"""Chooses the fault of a request, by its method and path; None lets the request pass."""

MOST_IN_SUCCESSION = 2
"""How often `random_faults` breaks the same request in succession; a client makes four attempts."""


class Exchange(BaseHTTPRequestHandler):
    """One connection of a client; a fault answers a request, or does not."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def forward(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """Send the request to the server; its status, headers and body."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        connection = http.client.HTTPConnection(self.server.behind, timeout=120)
        try:
            # The Host of the client is part of what it has signed.
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, length: int | None = None
    ) -> None:
        """Send an answer that may announce more bytes than it has."""
        self.send_response_only(status)
        left_out = ("content-length", "transfer-encoding", "connection")
        for name, value in headers:
            if name.lower() not in left_out:
                self.send_header(name, value)
        given = {name.lower(): value for name, value in headers}.get("content-length")
        size = str(len(body) if length is None else length)
        # An answer to HEAD has no body, and announces that of the object.
        self.send_header("Content-Length", given or size if self.command == "HEAD" else size)
        self.end_headers()
        self.wfile.write(body)

    def drop(self) -> None:
        """Close the connection without a further byte."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _exchange(self) -> None:
        fault = self.server.choose(self.command, self.path)
        self.server.seen.append((self.command, self.path))
        with contextlib.suppress(ConnectionError):
            if fault is None:
                self.answer(*self.forward())
            else:
                fault(self)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _exchange  # noqa: N815 - http.server's

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    behind: str
    choose: Choice
    seen: list[tuple[str, str]]

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about connections that break off."""


def error(status: int, code: str) -> Fault:
    """A fault that answers with an error of S3; the server does not get the request."""

    def answer(exchange: Exchange) -> None:
        exchange.rfile.read(int(exchange.headers.get("Content-Length") or 0))
        body = f"<Error><Code>{code}</Code><Message>made up by a test</Message></Error>".encode()
        if exchange.command == "HEAD":
            body = b""
        exchange.answer(status, [("Content-Type", "application/xml")], body)

    return answer


def drop_request(exchange: Exchange) -> None:
    """The connection ends before the server gets the request."""
    exchange.drop()


def drop_answer(exchange: Exchange) -> None:
    """The server does what was asked, and its answer is lost."""
    exchange.forward()
    exchange.drop()


def truncate_answer(exchange: Exchange) -> None:
    """Half of the body of the answer arrives, or nothing of an answer without one."""
    status, headers, body = exchange.forward()
    if body:
        exchange.answer(status, headers, body[: len(body) // 2], len(body))
    exchange.drop()


def delay_answer(exchange: Exchange) -> None:
    """The answer comes in two pieces, after a second each."""
    status, headers, body = exchange.forward()
    time.sleep(1)
    exchange.answer(status, headers, body[:1], len(body) if body else None)
    time.sleep(1)
    exchange.wfile.write(body[1:])


FAULTS: dict[str, Fault] = {
    "InternalError": error(500, "InternalError"),
    "SlowDown": error(503, "SlowDown"),
    "dropped request": drop_request,
    "dropped answer": drop_answer,
    "truncated answer": truncate_answer,
    "delayed answer": delay_answer,
}


def random_faults(faults: list[Fault], share: float, seed: int = 0) -> Choice:
    """Choose faults for a share of all requests, of which each succeeds in the end.

    Args:
        faults: one of them is chosen for a request.
        share: of the requests that fail.
        seed: of the choice.
    """
    rng, lock = random.Random(seed), threading.Lock()
    in_succession: collections.Counter[tuple[str, str]] = collections.Counter()

    def choose(method: str, path: str) -> Fault | None:
        with lock:
            if rng.random() > share or in_succession[method, path] >= MOST_IN_SUCCESSION:
                in_succession[method, path] = 0
                return None
            in_succession[method, path] += 1
            return rng.choice(faults)

    return choose


class FaultyProxy:
    """A proxy that runs.

    Attributes:
        url: of the proxy.
        seen: method and path of every request.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.seen = server.seen

    def set_faults(self, choose: Choice) -> None:
        """Choose the faults of all requests from now on."""
        self._server.choose = choose


@contextlib.contextmanager
def faulty_proxy(url: str, choose: Choice = lambda method, path: None) -> Iterator[FaultyProxy]:
    """A proxy in front of a server, as long as the block runs."""
    server = _Server(("127.0.0.1", 0), Exchange)
    server.behind, server.choose, server.seen = urllib.parse.urlsplit(url).netloc, choose, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield FaultyProxy(server)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
