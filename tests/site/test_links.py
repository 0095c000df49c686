"""Links of all Markdown files lead to files and headings that exist, as GitHub shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.documentation import ROOT, anchors, links, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), (
                f"{page.name} links to {link}; there are {sorted(anchors(target))}"
            )


def test_anchors_are_those_of_github(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A `code-block` & [link](x.md)\n\n## What happens when ...\n\n## Same\n\n## Same\n")
    assert anchors(page) == {"a-code-block--link", "what-happens-when-", "same", "same-1"}
