"""Links of all Markdown files lead to files and headings that exist, as GitHub shows them."""

from __future__ import annotations

from pathlib import Path

from tests.support.documentation import ROOT, anchors, links, pages


def leads_nowhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or bool(anchor and anchor not in anchors(target))


def test_every_relative_link_leads_to_a_file_and_a_heading():
    assert len(pages()) >= 40
    offenders = [
        f"{page.relative_to(ROOT)} links to {link}"
        for page in pages()
        for link in links(page)
        if leads_nowhere(page, link)
    ]
    assert offenders == []


def test_a_link_that_leads_nowhere_is_noticed_and_anchors_are_those_of_github(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Here\n\n[a](#here) [b](#there) [c](page.md#here) [d](page.md#there) [e](no.md)\n")
    assert [link for link in links(page) if leads_nowhere(page, link)] == ["#there", "page.md#there", "no.md"]
    page.write_text("# A `code-block` & [link](x.md)\n\n## What happens when ...\n\n## Same\n\n## Same\n")
    assert anchors(page) == {"a-code-block--link", "what-happens-when-", "same", "same-1"}
