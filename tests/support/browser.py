"""A headless Chromium for tests that opens pages from files and reports its requests and errors."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imread
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.support.programs import give_up

SIZE = (1300, 1500)


PATIENCE = 120.0
"""Seconds to wait for a page, which may itself wait for a run to start on a busy machine."""


def missing() -> str:
    """Return why there can be no browser here; empty if there can."""
    there = all(shutil.which(name) for name in ("chromium", "chromedriver"))
    return "" if there else "no Chromium here: apt-get install chromium chromium-driver"


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser; if Chromium is missing, the test is skipped, and under ``CI`` it fails."""
    if reason := missing():
        give_up(reason)
    options = webdriver.ChromeOptions()
    # Needed as root, and in containers with little shared memory.
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "force-device-scale-factor=1"):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--window-size={SIZE[0]},{SIZE[1]}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_script_timeout(PATIENCE)
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """A browser and everything that tests do with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        """Open a report and wait until it is drawn."""
        self.open_url(path.as_uri())

    def open_url(self, url: str) -> None:
        """Open a page and wait until it is drawn."""
        self.driver.get("about:blank")  # so that the page before asks for nothing more
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(url)
        self.wait_until_still()

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, patience: float = PATIENCE) -> Any:
        """Wait until a script returns something true, and return that."""
        return WebDriverWait(self.driver, patience, poll_frequency=0.05).until(lambda _: self.run(script))

    def wait_until_still(self) -> None:
        """Wait until labels and figures are drawn: the page's own delay, and two frames of the screen.

        The wait is a state of the page, so that it begins again on a page that reloads itself in the middle.
        """
        self.run("window.still = undefined")
        self.wait(
            "if (document.body?.dataset.ready !== 'yes') return false;"
            "if (window.still === undefined) {"
            " const frame = (then) => requestAnimationFrame(then);"
            " window.still = false;"
            " setTimeout(() => frame(() => frame(() => { window.still = true; })), 150);"
            "}"
            "return window.still"
        )

    def complaints(self) -> list[str]:
        """Return console messages above the level of information."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def requests(self) -> list[str]:
        """Return the URLs requested since the page was opened, except data inside the page."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("data:", "blob:"))]

    def screenshot(self) -> np.ndarray:
        """Return the visible part of the page, uint8, shape (height, width, 3)."""
        pixels = imread(io.BytesIO(self.driver.get_screenshot_as_png()))[..., :3] * 255
        return np.round(pixels).astype(np.uint8)

    def frame(self, figure: str) -> Frame:
        """Return the place of a figure's inside on the screen, and the range of data that it shows."""
        values = self.run(
            "const plot = penstock.find(arguments[0] + '-figure');"
            "const view = Bokeh.index.find_one(plot);"
            "view.el.scrollIntoView();"
            "const box = view.canvas_view.el.getBoundingClientRect(), inner = view.frame.bbox;"
            "return [box.left + inner.left, box.top + inner.top, inner.width, inner.height,"
            " plot.x_range.start, plot.x_range.end, plot.y_range.start, plot.y_range.end]",
            figure,
        )
        return Frame(*values)

    def choose(self, label: str) -> None:
        """Choose the step that is shown."""
        Select(self.driver.find_element("id", "step")).select_by_visible_text(label)
        self.wait_until_still()

    def scheme(self, name: str) -> None:
        """Prefer the colours "light" or "dark"; "" for the browser's own."""
        features = [{"name": "prefers-color-scheme", "value": name}] if name else []
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.wait_until_still()

    def move(self, x: float, y: float, click: bool = False) -> None:
        """Move the pointer to a place from beside it."""
        actions = ActionChains(self.driver, duration=0)
        pointer = actions.w3c_actions.pointer_action
        pointer.move_to_location(int(x) - 3, int(y))
        pointer.move_to_location(int(x), int(y))
        if click:
            pointer.click()
        actions.perform()

    def wheel(self, x: float, y: float, clicks: int) -> None:
        """Turn the wheel forward over a place with the control key pressed."""
        origin = ScrollOrigin.from_viewport(int(x), int(y))
        for _ in range(clicks):  # one by one, since Chromium merges several at once
            actions = ActionChains(self.driver, duration=0).key_down(Keys.CONTROL)
            actions.scroll_from_origin(origin, 0, -240).key_up(Keys.CONTROL).perform()

    def frame_milliseconds(self) -> float:
        """Drag the timeline, and return the median milliseconds between two frames."""
        frame = self.frame("measured")
        x, y = int(frame.left + frame.width / 2), int(frame.top + frame.height / 2)
        self.run(
            "window.frames_seen = []; window.watching = true;"
            "const tick = (now) => { frames_seen.push(now); if (watching) requestAnimationFrame(tick); };"
            "requestAnimationFrame(tick)"
        )
        actions = ActionChains(self.driver, duration=20)
        place = actions.w3c_actions.pointer_action
        place.move_to_location(x, y)
        place.pointer_down()
        for n in range(30):
            place.move_to_location(x - 4 * n, y)
        place.pointer_up()
        actions.perform()
        seen = np.diff(self.run("watching = false; return frames_seen"))
        return float(np.median(seen))

    def tooltip(self) -> str:
        """Return the text of the visible tooltip; empty without one."""
        return str(
            self.run(
                "const all = [];"
                "const look = (root) => { for (const e of root.querySelectorAll('*')) {"
                " if (e.classList.contains('tip') && e.getBoundingClientRect().width > 0) all.push(e.innerText);"
                " if (e.shadowRoot) look(e.shadowRoot); } };"
                "look(document); return all.join('|')"
            )
        )


class Frame:
    """A figure's coordinates on the screen, in proportion to its data."""

    def __init__(self, left: float, top: float, width: float, height: float, *ranges: float) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height
        self.x0, self.x1, self.y0, self.y1 = ranges

    def x(self, value: Any) -> Any:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * self.width

    def y(self, value: Any) -> Any:
        return self.top + (self.y1 - value) / (self.y1 - self.y0) * self.height
