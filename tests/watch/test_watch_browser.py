"""The watching page in a real browser, while a real run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.train.config.file import dump
from penstock.watch.watch_server import WatchServer
from tests.support.browser import Browser, browser
from tests.support.measured import kept_run
from tests.support.tiny_run import text_folder, tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as chromium:
        yield chromium


@contextmanager
def watched(run: Path) -> Iterator[WatchServer]:
    with WatchServer(run) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def text(chromium: Browser, name: str) -> str:
    return str(chromium.run("return document.getElementById(arguments[0]).innerText", name))


def wait_for_state(chromium: Browser, state: str) -> None:
    chromium.wait(f"return document.getElementById('state').innerText === {state!r}")


def start(root: Path, *pairs: str) -> subprocess.Popen[bytes]:
    told = {"steps": 100_000, "log_every": 1, "trace_every": 10, "eval_every": 20, "checkpoint_every": 0}
    (root / "run.toml").write_text(dump(tiny(root, text_folder(root), train=told)))
    command = [sys.executable, "-m", "penstock", "train", str(root / "run.toml"), *pairs]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def points(chromium: Browser, chart: str = "loss") -> int:
    return int(chromium.run("return penstock.find(arguments[0]).data.xs[0]?.length ?? 0", chart))


def test_points_are_added_while_the_run_goes_on_until_it_is_stopped(chromium: Browser, tmp_path: Path):
    with watched(tmp_path / "runs" / "tiny") as server:
        chromium.open_url(server.url)
        wait_for_state(chromium, "waiting")
        assert "This page waits for it" in text(chromium, "message")
        with start(tmp_path) as run:
            try:
                wait_for_state(chromium, "running")
                chromium.wait("return (penstock.find('loss').data.xs[0]?.length ?? 0) > 3")
                seen = points(chromium)
                chromium.wait(f"return penstock.find('loss').data.xs[0].length > {seen}")
                assert points(chromium, "rss") >= seen
                chromium.wait("return penstock.find('timeline').data.left.length === 16")
                assert "1f1b, 2 ranks" in text(chromium, "timeline-text")
                assert "of 100,000" in text(chromium, "progress")
                assert "running" in text(chromium, "ranks")
                run.send_signal(signal.SIGTERM)
                assert run.wait(120) == 75
            finally:
                run.kill()
        wait_for_state(chromium, "stopped")
        assert "stopped after step" in text(chromium, "message")
        drawn = chromium.run("return penstock.find('loss').data")
        assert drawn["xs"][0] == list(range(1, len(drawn["xs"][0]) + 1))
        assert {url.removeprefix(server.url).partition("?")[0] for url in chromium.requests()} == {
            "", "state", "timeline",
        }  # fmt: skip
        assert chromium.complaints() == []
    wait_for_state(chromium, "lost")
    assert "penstock watch has ended" in text(chromium, "message")


def test_a_killed_run_is_dead(chromium: Browser, tmp_path: Path):
    with watched(tmp_path / "runs" / "tiny") as server, start(tmp_path) as run:
        chromium.open_url(server.url)
        try:
            wait_for_state(chromium, "running")
        finally:
            run.kill()
        run.wait()
        wait_for_state(chromium, "dead")
        assert "Rank 0 ended without a word" in text(chromium, "message")
        assert "dead" in text(chromium, "ranks")


def test_a_finished_run_on_wide_narrow_and_dark_screens(chromium: Browser, tmp_path: Path):
    run = kept_run(tmp_path, "<b>name & co")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "final", "step": 3}\n')
    with watched(run) as server:
        chromium.open_url(server.url)
        wait_for_state(chromium, "done")
        assert chromium.run("return document.querySelector('h1').innerText") == "<b>name & co"
        assert chromium.run("return penstock.find('loss').data.ys[0]") == [5.0, 2.5, pytest.approx(5 / 3)]
        assert points(chromium, "tokens_per_second") == 3
        assert chromium.run("return document.getElementById('section-rss').hidden") is True
        colours = {}
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            chromium.wait_until_still()
            label = chromium.run("return penstock.find('loss-figure').left[0].major_label_text_color")
            colours[scheme] = (label, int(chromium.screenshot()[2, 2].mean()) > 128)
        chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        assert colours == {"light": ("#1c2329", True), "dark": ("#e6eaee", False)}
        size = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        chromium.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        chromium.wait_until_still()
        assert chromium.run("return document.documentElement.scrollWidth") == 400
        chromium.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        assert chromium.complaints() == []
        chromium.open_url(server.url + "report")
        assert "Timeline" in chromium.run("return document.body.innerText")
