"""The server of the watching page answers those who have its address, and nobody else."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import group
from penstock.errors import ConfigError
from penstock.trace.folder import read_file, step_path
from penstock.watch import step_timeline, watch_server
from penstock.watch.watch_server import WatchServer
from tests.support.measured import kept_run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchServer]:
    with WatchServer(kept_run(tmp_path_factory.mktemp("runs"))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


Answer = tuple[int, dict[str, str], bytes]


def ask(server: WatchServer, path: str, method: str = "GET", **headers: str) -> Answer:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_page_its_state_a_timeline_and_the_report(server: WatchServer):
    status, headers, page = ask(server, f"/{server.token}/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"<title>my-run</title>" in page
    assert headers["Cache-Control"] == "no-store"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    status, headers, body = ask(server, f"/{server.token}/state?generation=-1&rows=0")
    state = json.loads(body)
    assert (status, headers["Content-Type"], len(state["rows"]), state["traced"]) == (
        200,
        "application/json",
        3,
        10,
    )
    again = json.loads(ask(server, f"/{server.token}/state?generation={state['generation']}&rows=3")[2])
    assert again["rows"] == []
    timeline = json.loads(ask(server, f"/{server.token}/timeline?step=10")[2])
    trace, _ = read_file(step_path(server.feed.run, 10))
    assert len(timeline["columns"]["left"]) == len(trace)
    assert (timeline["ranks"], timeline["unit"], timeline["schedule"]) == (2, "ms", "1f1b")
    assert timeline["columns"]["text"][:2] == ["F0", "F1"]
    status, headers, report = ask(server, f"/{server.token}/report")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"Timeline</h2>" in report
    assert sorted(path.name for path in server.feed.run.iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "traces",
    ]


def test_bytes_that_are_no_request_get_no_page(server: WatchServer):
    host = f"Host: 127.0.0.1:{server.server_address[1]}".encode()
    for request in (
        b"GET /\xe9\xff/ HTTP/1.1\r\n" + host,
        b"\x00\x01",
        b"GET /" + b"x" * 70_000,
        b"GET * HTTP/1.1\r\n" + host,
    ):
        with socket.create_connection(server.server_address[:2], timeout=60) as connection:
            connection.sendall(request + b"\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda connection=connection: connection.recv(1 << 16), b""))
            assert b"my-run" not in answer


def test_head_sends_no_body(server: WatchServer):
    status, headers, body = ask(server, f"/{server.token}/", "HEAD")
    assert (status, int(headers["Content-Length"]), body) == (200, len(server.page), b"")


@pytest.mark.parametrize(
    "path",
    [
        "/", "", "/x/", "/TOKEN", "/TOKEN/config.toml", "/TOKEN/../TOKEN/", "/TOKEN/..%2f..%2fetc/passwd", "/TOKEN/state/",
        "/TOKEN/traces/step-000010.npz", "/TOKENx/", "/TOKE/", "/%54/", "/TOKEN/timeline?step=7",
        "/TOKEN/timeline?step=-1", "/TOKEN/timeline?step=../../x", "/TOKEN/timeline", "http://evil.example/TOKEN/x",
    ],
)  # fmt: skip
def test_no_other_address_gets_anything(server: WatchServer, path: str):
    status, _, body = ask(
        server, path.replace("TOKEN", server.token).replace("TOKE/", server.token[:-1] + "/") or "*"
    )
    assert (status, body) == (404, b"")


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "[::1]:PORT", ""]
)
def test_another_host_header_is_refused(server: WatchServer, name: str):
    """As of a page that reaches this server under a name of its own (DNS rebinding)."""
    port = str(server.server_address[1])
    assert ask(server, f"/{server.token}/", Host=name.replace("PORT", port))[::2] == (404, b"")
    assert ask(server, f"/{server.token}/", Host=f"localhost:{port}")[0] == 200


def test_requests_of_other_sites_and_methods_that_write_are_refused(server: WatchServer):
    assert ask(server, f"/{server.token}/state", Sec_Fetch_Site="cross-site")[::2] == (403, b"")
    assert ask(server, f"/{server.token}/state", Sec_Fetch_Site="same-origin")[0] == 200
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(server, f"/{server.token}/state", method)[0] == 501


def test_queries_that_are_no_numbers_count_as_none(server: WatchServer):
    for query in (
        "generation=x&rows=",
        "rows=99999999999999999999",
        "rows=%00",
        "&" * 50,
        "a=1&" * 50,
        "rows=١",
    ):
        quoted = query.encode("utf-8").decode("latin-1") if query.isascii() else "rows=%D9%A1"
        status, _, body = ask(server, f"/{server.token}/state?{quoted}")
        assert (status, len(json.loads(body)["rows"])) == (200, 3)


def test_it_listens_on_the_loopback_interface_alone(server: WatchServer):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}/{server.token}/"
    assert len(server.token) >= 32


def test_several_viewers_are_answered_at_once_beside_one_that_says_nothing(server: WatchServer):
    with socket.create_connection(server.server_address[:2]) as silent, ThreadPoolExecutor(8) as pool:
        silent.sendall(b"GET /")
        answers = list(pool.map(lambda _: ask(server, f"/{server.token}/state"), range(40)))
    assert {status for status, _, _ in answers} == {200}
    assert len({body for _, _, body in answers}) == 1


def test_a_run_without_traces_has_no_report_yet(tmp_path: Path):
    with WatchServer(tmp_path / "later") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            status, _, body = ask(server, f"/{server.token}/report")
            assert (status, b"later is neither a run's folder nor a trace file" in body) == (404, True)
            assert json.loads(ask(server, f"/{server.token}/state")[2])["state"] == "waiting"
            assert not (tmp_path / "later").exists()
        finally:
            server.shutdown()
            thread.join()


def test_a_timeline_of_very_many_blocks_has_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_timeline, "MAX_BLOCKS", 5)
    timeline = step_timeline.step_timeline(kept_run(tmp_path), 10)
    assert (len(timeline["columns"]["left"]), timeline["omitted"]) == (5, 7)
    assert timeline["columns"]["left"] == sorted(timeline["columns"]["left"])


def test_a_port_in_use_and_a_missing_bokeh_are_told(
    server: WatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    port = server.server_address[1]
    with pytest.raises(
        ConfigError, match=f"cannot serve on port {port}: Address already in use; give another --port"
    ):
        WatchServer(tmp_path, port)
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    monkeypatch.setattr(watch_server, "watch_page", watch_server.watch_page)
    with pytest.raises(ConfigError, match=r"needs bokeh: pip install 'penstock\[report\]'"):
        WatchServer(tmp_path)


def test_a_file_is_refused_as_a_run(tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(group, ["watch", str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "is a file" in result.output


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path):
    command = [sys.executable, "-m", "penstock", "watch", str(tmp_path / "later")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second, address = (process.stdout.readline() for _ in range(3))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "\n", "")
    waits = "there is no such folder yet, and the page waits for it"
    assert first == f"watching {tmp_path / 'later'}; {waits}\n"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]+/\n", address)  # alone, so that it can be copied
    assert second == "Ctrl-C stops watching, and not the run\n"
