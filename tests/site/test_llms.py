"""docs/llms.txt, for language models: every page of the documentation once, in the form of https://llmstxt.org."""

from __future__ import annotations

import re

from tests.support.documentation import DOCS, anchors, pages

TEXT = (DOCS / "llms.txt").read_text()
LINKS = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S.*$", TEXT, re.M)


def test_every_page_is_listed_once_and_every_link_exists():
    written = sorted(page.relative_to(DOCS).as_posix() for page in pages() if DOCS in page.parents)
    assert sorted(LINKS) == written


def test_it_has_a_title_a_summary_and_sections_of_links_alone():
    title, _, summary, *_ = TEXT.splitlines()
    assert title == "# Penstock"
    assert summary.startswith("> ")
    _, *sections = re.split(r"^## .+\n\n", TEXT, flags=re.M)
    assert len(sections) >= 5
    lines = [line for section in sections for line in section.splitlines() if line]
    assert len(lines) == len(LINKS)


def test_a_title_is_that_of_its_page():
    for title, link in re.findall(r"^- \[([^]]+)\]\(((?:coming_from|reference)/[^)]+)\)", TEXT, re.M):
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        assert name in anchors(DOCS / link), link
