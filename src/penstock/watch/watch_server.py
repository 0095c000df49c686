"""The server of the watching page: on the loopback interface alone, behind a token, and it writes nothing.

A browser of this machine also runs pages of strangers, which may send requests to this server. They do not know the token in
the address, and a page that reached the server under a name of its own (DNS rebinding) has another Host header.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from penstock.errors import ConfigError, PenstockError
from penstock.scratch import Scratch
from penstock.show.run import read_run, write_report
from penstock.watch.run_feed import RunFeed
from penstock.watch.step_timeline import step_timeline
from penstock.watch.watch_page import watch_page

HOST = "127.0.0.1"
_IDLE = 30.0  # seconds until a connection that sends nothing is closed

_HTML, _JSON = "text/html; charset=utf-8", "application/json"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WatchServer(ThreadingHTTPServer):
    """Server of one run's page, each request in a thread of its own.

    Args:
        run: folder of the run, which may not exist yet.
        port: port on the loopback interface; 0 (default) takes a free one.

    Attributes:
        url: address of the page, with the token.

    Raises:
        ConfigError: if the port is in use or not allowed, or Bokeh is not installed.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, run: Path, port: int = 0) -> None:
        self.feed = RunFeed(run)
        self.page = watch_page(self.feed.title)
        self.token = secrets.token_urlsafe(24)
        self._timelines: dict[int, bytes] = {}
        self._report: tuple[tuple[int, int, int], bytes] | None = None
        self._report_lock = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"cannot serve on port {port}: {reason}; give another --port, or leave it out for a free one"
            ) from error
        self.names = {f"{name}:{self.server_address[1]}" for name in (HOST, "localhost")}
        self.url = f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a viewer that closes its connection is no error."""

    def state(self, query: dict[str, list[str]]) -> bytes:
        """Return the state of the run since the last answer, as JSON."""
        state = self.feed.state(_number(query, "generation", -1), _number(query, "rows", 0))
        return json.dumps(state, allow_nan=False).encode()

    def timeline(self, query: dict[str, list[str]]) -> bytes | None:
        """Return a traced step as JSON; None if there is no such trace."""
        step = _number(query, "step", -1)
        if step not in self.feed.traced():
            return None
        if step not in self._timelines:
            self._timelines = {step: json.dumps(step_timeline(self.feed.run, step)).encode()}
        return self._timelines[step]

    def report(self) -> bytes:
        """Return the report page of the run so far.

        Raises:
            PenstockError: if the run has no trace yet.
        """
        version = self.feed.version
        with self._report_lock:
            if self._report is None or self._report[0] != version:
                with Scratch() as scratch:
                    page = write_report(read_run(self.feed.run), scratch.path / "report.html")
                    self._report = version, page.read_bytes()
            return self._report[1]


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of four addresses; everything else is refused."""

    server: WatchServer
    server_version, sys_version = "penstock", ""
    timeout = _IDLE

    def do_GET(self) -> None:  # the name that http.server calls
        """Answer a request."""
        url = urlsplit(self.path)
        _, token, name = parts if len(parts := url.path.split("/")) == 3 else ("", "", "")
        # The time that the comparison takes does not tell how much of a token is right.
        known = secrets.compare_digest(token.encode(), self.server.token.encode())
        if self.headers.get("Host") not in self.server.names or not known:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            self._answer(HTTPStatus.FORBIDDEN)
            return
        try:
            query = parse_qs(url.query, max_num_fields=8)
        except ValueError:
            query = {}
        answers: dict[str, tuple[str, Callable[[], bytes | None]]] = {
            "": (_HTML, lambda: self.server.page),
            "state": (_JSON, lambda: self.server.state(query)),
            "timeline": (_JSON, lambda: self.server.timeline(query)),
            "report": (_HTML, self.server.report),
        }
        if name not in answers:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        kind, make = answers[name]
        try:
            body = make()
        except PenstockError as error:
            self._answer(
                HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", f"{error}\n".encode(errors="replace")
            )
            return
        if body is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        self._answer(HTTPStatus.OK, kind, body)

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: HTTPStatus, kind: str = "text/plain", body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a page asks every second."""


def _number(query: dict[str, list[str]], name: str, default: int) -> int:
    text = query.get(name, [""])[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else default
