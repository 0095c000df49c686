"""The reference of the API lists every public name once."""

from __future__ import annotations

import re
from collections import Counter

import penstock
import penstock.plan
from tests.support.documentation import DOCS

REFERENCE = DOCS / "reference"
MODULE = re.compile(
    r"^\.\. currentmodule:: (\S+)$|^\.\. auto(?:class|exception|function|data):: (\w+)$", re.M
)


def listed() -> Counter[str]:
    """Full names of the entries of all pages of the reference that a module exports."""
    names: Counter[str] = Counter()
    for page in REFERENCE.glob("*.md"):
        module = ""
        for found, name in MODULE.findall(page.read_text()):
            module = found or module
            if name:
                names[f"{module}.{name}"] += 1
    return names


def test_every_public_name_is_listed_once_and_nothing_else():
    public = {f"{module.__name__}.{name}" for module in (penstock, penstock.plan) for name in module.__all__}
    assert listed() == Counter(public - {"penstock.__version__"})


def test_every_page_of_the_reference_is_in_its_index():
    index = (REFERENCE / "index.md").read_text()
    for page in REFERENCE.glob("*.md"):
        assert page.stem == "index" or f"]({page.name})" in index
