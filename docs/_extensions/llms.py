"""``llms.txt`` of the site: the file beside the pages, with links to what was built (https://llmstxt.org)."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

LINK = re.compile(r"(\]\([\w/]+)\.md\)")


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the file into the folder of the site once its pages are there."""
    if error is None and app.builder.format == "html":
        text = (Path(app.srcdir) / "llms.txt").read_text()
        (Path(app.outdir) / "llms.txt").write_text(LINK.sub(r"\1.html)", text))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
