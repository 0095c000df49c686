"""The page of a run that is under way, in a real browser: it reloads itself, and the reader keeps the place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.show.run import read_run, write_report
from penstock.trace.folder import save_step
from penstock.train.config.file import dump
from tests.support.measured import kept_run, measured
from tests.support.tiny_run import text_folder, tiny
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.browser import Browser

pytestmark = pytest.mark.slow

NOTE = "document.getElementById('note')?.innerText"


def write(run: Path, note: str, reload_seconds: int = 2) -> Path:
    return write_report(read_run(run), run / "report.html", note=note, reload_seconds=reload_seconds)


def wait_for_note(chromium: Browser, note: str) -> None:
    chromium.wait(f"return document.body?.dataset.ready === 'yes' && {NOTE} === {note!r}")


def place(chromium: Browser) -> Any:
    """Return where the reader is, once the page is drawn."""
    return chromium.wait(
        "if (document.body?.dataset.ready !== 'yes') return null;"
        "const { x_range, y_range } = penstock.find('measured-figure');"
        "const open = [...document.querySelectorAll('details')].filter((one) => one.open);"
        "return {"
        " top: window.scrollY, step: document.getElementById('step').selectedOptions[0].textContent,"
        " zoom: [x_range.start, x_range.end, y_range.start, y_range.end],"
        " open: open.map((one) => one.querySelector('summary').textContent) }"
    )


def test_the_reader_keeps_the_place_through_new_versions_to_the_last(chromium: Browser, tmp_path: Path):
    run = kept_run(tmp_path)
    chromium.open(write(run, "first"))
    chromium.choose("step 1")
    chromium.run(
        "for (const one of document.querySelectorAll('details')) one.open = one.innerText.startsWith('Resolved');"
        "penstock.find('measured-figure').x_range.setv({ start: 100, end: 300 });"
        "window.scrollTo(0, 432)"
    )
    before = place(chromium)
    assert (before["top"], before["step"], before["open"]) == (432, "step 1", ["Resolved config"])
    save_step(run, 20, measured())
    write(run, "second")
    wait_for_note(chromium, "second")
    assert place(chromium) == before
    chromium.wait("return document.getElementById('step')?.options.length === 3")
    write(run, "the end", 0)
    wait_for_note(chromium, "the end")
    assert place(chromium) == before
    assert chromium.run("return document.getElementById('note').dataset.reload") is None
    assert chromium.complaints() == []


@pytest.mark.exhaustive  # one who keeps an older step is above
def test_a_reader_of_the_latest_step_sees_the_next_one(chromium: Browser, tmp_path: Path):
    run = kept_run(tmp_path)
    chromium.open(write(run, "first"))
    assert place(chromium)["step"] == "step 10"
    save_step(run, 20, measured())
    write(run, "second")
    wait_for_note(chromium, "second")
    assert place(chromium)["step"] == "step 20"


@contextmanager
def own_clock(chromium: Browser, milliseconds: str) -> Iterator[None]:
    """Give each load of a page a clock that is ahead by a JavaScript expression's value."""
    clock = f"const now = Date.now; Date.now = () => now() + ({milliseconds})"
    added = chromium.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": clock})
    try:
        yield
    finally:
        chromium.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_page_without_new_versions_says_so(chromium: Browser, tmp_path: Path):
    """The page's second load sees a clock that is 400 seconds later, so that one reload is enough."""
    with own_clock(chromium, "400000 * (window.loads ??= window.name = Number(window.name) + 1)"):
        chromium.open(write(kept_run(tmp_path), "first"))
        # A load stays four times as long as it took to draw, which is a minute on a machine that is busy.
        chromium.wait(f"return /^first No new version for [6-9] minutes: /.test({NOTE})", 400)


def test_a_page_that_takes_longer_to_draw_than_its_reloads_are_apart_can_be_read(
    chromium: Browser, tmp_path: Path
):
    with own_clock(chromium, "document.body?.dataset.ready === 'yes' ? 100000 : 0"):
        page = write(kept_run(tmp_path), "first")
        chromium.open(page)
        assert chromium.requests().count(page.as_uri()) == 1


SOON = (
    "import sys, time",
    "from penstock.cli import main",
    "from penstock.show import run_page",
    "from penstock.train import trainer",
    "run_page.EVERY = 5  # seconds, instead of a minute",
    "batch = trainer.training_batch",
    "trainer.training_batch = lambda *given: time.sleep(0.05) or batch(*given)",
    "sys.exit(main())",
)


def test_a_real_run_is_followed_until_it_is_stopped(chromium: Browser, tmp_path: Path):
    told = {"steps": 1_000_000, "log_every": 10, "trace_every": 0, "eval_every": 10_000, "report": True}
    (tmp_path / "run.toml").write_text(dump(tiny(tmp_path, text_folder(tmp_path), train=told)))
    command = [sys.executable, "-c", "\n".join(SOON), "train", str(tmp_path / "run.toml")]
    page = tmp_path / "runs" / "tiny" / "report.html"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as run:
        try:
            until(page.exists, limit=300)
            chromium.open(page)
            chromium.wait(f"return ({NOTE} ?? '').includes('The run is under way: step ')")
            run.send_signal(signal.SIGTERM)
            assert run.wait(120) == 75
        finally:
            run.kill()
    chromium.wait(f"return ({NOTE} ?? '').startsWith('The run stopped after step ')")
    assert set(chromium.requests()) == {page.as_uri()}
    assert chromium.complaints() == []
