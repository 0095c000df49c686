"""The code in the guide runs as it is printed."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["models.md", "planning.md"])
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the files that it writes
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    assert blocks
    names: dict[str, object] = {"__name__": "a_page"}
    for number, block in enumerate(blocks):
        name = f"{page}-{number}"
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
        exec(compile(block, name, "exec"), names)
