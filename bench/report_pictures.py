"""The pictures of docs/reading_the_report.md: the upper parts of a run's page and of the page of two runs, in Chromium.

The runs were made by

    penstock train train.name=demo train.steps=60 train.trace_every=20
    penstock train train.name=zb train.steps=60 train.trace_every=20 schedule.name=zb-h1

and a picture has a palette of 200 colours, so that it is small.

    python -m bench.report_pictures runs/demo runs/zb [--folder docs/report]
"""

from __future__ import annotations

import argparse
import base64
import io
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from tests.support.browser import Browser, browser

from penstock.show.comparison import pair_of, write_comparison
from penstock.show.run import read_run, write_report

WIDTH, COLOURS = 1100, 200
FOLDER = Path(__file__).parents[1] / "docs" / "report"


def picture(chromium: Browser, page: Path, until: str) -> bytes:
    """Return a page above the element that a selector finds, as PNG."""

    def resize(height: int) -> None:
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        chromium.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    resize(900)
    chromium.open(page)
    height = chromium.run(
        "return Math.round(document.querySelector(arguments[0]).getBoundingClientRect().top)", until
    )
    resize(height - 8)
    for _ in range(2):  # the figures draw once more after the page has its size
        chromium.wait_until_still()
    shot = chromium.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    small = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def main(say: Callable[[str], None] = print) -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs=2, type=Path, help="folders of two runs")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="folder to write to (default docs/report)"
    )
    options = parser.parse_args()
    first, second = map(read_run, options.runs)
    options.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        pages = {
            "page.png": (write_report(first, Path(folder) / "page.html"), "#bars"),
            "compare.png": (
                write_comparison(Path(folder) / "compare.html", pair_of(first, second, None)),
                "#curve-0",
            ),
        }
        for name, (page, until) in pages.items():
            content = picture(chromium, page, until)
            (options.folder / name).write_bytes(content)
            say(f"{options.folder / name}: {len(content):,} bytes")


if __name__ == "__main__":
    main()
