"""The site builds without a warning, and has a page for everything that it should have one for."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
import penstock.plan
from penstock.cli import COMMANDS
from penstock.schedule.families import FAMILIES
from tests.support.documentation import DOCS, ROOT

pytest.importorskip("selenium")
pytest.importorskip("sphinx")

from tests.support.browser import browser

pytestmark = pytest.mark.slow

MAKEFILE = (ROOT / "Makefile").read_text()
NOTEBOOKS = sorted(path.stem for path in (DOCS / "notebooks").glob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the site, built without running its notebooks."""
    without = (
        "nb_execution_mode=off",
        "suppress_warnings=myst-nb.lexer",
    )  # a kernel tells a notebook's language
    return built(tmp_path_factory.mktemp("site"), *(word for value in without for word in ("-D", value)))


def built(folder: Path, *options: str) -> Path:
    """Build the site by the command of ``make docs`` with another folder for its result, and return that."""
    (line,) = re.findall(r"^docs:.*\n\t\$\(BIN\)/python (.*) docs docs/_build/html$", MAKEFILE, re.M)
    assert {"-W", "-n"} <= set(line.split())
    html = folder / "html"
    done = subprocess.run(
        [sys.executable, *shlex.split(line), *options, "docs", str(html)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, "\n".join(
        line for line in done.stdout.splitlines() if "WARNING" in line or "Error" in line
    )
    return html


def test_language_models_find_every_page(site: Path):
    links = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text())
    assert len(links) > 50
    assert [link for link in links if not (site / link).is_file()] == []


def test_every_public_name_command_and_schedule_has_its_place(site: Path):
    reference = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    entries = set(re.findall(r'id="(penstock\.[\w.]+)"', reference))
    for module in (penstock, penstock.plan):
        assert {f"{module.__name__}.{name}" for name in module.__all__} - {"penstock.__version__"} <= entries
    commands = (site / "commands.html").read_text()
    assert all(f'<section id="penstock-{name}">' in commands for name in COMMANDS)
    table = (site / "gallery.html").read_text()
    for name in FAMILIES:
        assert f'href="gallery/{name}.html"' in table
        assert (site / "_images" / f"{name}.svg").stat().st_size > 10_000
        assert "makespan" in (site / "gallery" / f"{name}.html").read_text()


@pytest.mark.exhaustive  # a kernel for each notebook takes as long as the rest of the site
def test_notebooks_run_and_show_their_outputs(tmp_path: Path):
    site = built(tmp_path)
    for name in NOTEBOOKS:
        text = (site / "notebooks" / f"{name}.html").read_text()
        cells = (DOCS / "notebooks" / f"{name}.md").read_text().count("```{code-cell}")
        assert cells >= 5
        assert text.count("cell_output") >= cells - 2
        assert "Traceback" not in text
        assert "not found" not in text
        assert next((site / "_downloads").rglob(f"{name}.ipynb")).stat().st_size > 1000


def test_text_ends_within_the_screen_at_every_width(site: Path):
    ends = "return [document.querySelector('article').getBoundingClientRect().right, document.documentElement.clientWidth]"
    with browser() as chromium:
        for width in (360, 400, 800, 1000, 1200, 1250, 1300, 1400, 1600, 1650, 1920):
            chromium.driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
            )
            chromium.driver.get((site / "models.html").as_uri())
            article, screen = chromium.run(ends)
            # Furo leaves an em to each side at least; without it, the page scrolls sideways.
            assert article + 16 <= screen, f"at {width} pixels the text ends at {article}, of {screen}"
