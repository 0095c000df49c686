"""Links and includes of files outside ``docs/``, so that the same Markdown works on GitHub and on the site.

On GitHub a page links to ``../CONTRIBUTING.md`` and ``../examples/own_loop.py``. On the site the first is a page of its own,
which includes the file by a fenced ``{include}``, and the second a section of the page that shows the folder by a fenced
``{files}``. Links of included files, such as ``docs/models.md``, lead to the pages again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "bench/RESULTS.md": "results.md",
}
"""Pages of ``docs/`` that show a file of the repository."""
FOLDERS = {"examples": "examples.md", "recipes": "recipes.md"}
"""Page of ``docs/`` that shows the files of a folder, each under its path as a heading."""
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".sbatch": "sh"}
INCLUDE = re.compile(r"^```\{include\} (\.\./\S+)\n```$", re.M)
FILES = re.compile(r"^```\{files\} \.\./(\S+)\n```$", re.M)
PATTERN = re.compile(r"^[\w/]+\*$\n", re.M)
LINK = re.compile(r"(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")
FENCED = re.compile(r"(^```.*?^```$)", re.S | re.M)


def rewritten(text: str, folder: Path, page: Path) -> str:
    """Return Markdown with its relative links rewritten for a page of the site.

    Args:
        text: Markdown of a file.
        folder: folder of that file.
        page: page of ``docs/`` that shows it.
    """

    def target(link: re.Match[str]) -> str:
        before, path, after = link.groups()
        if not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        name = os.path.relpath((folder / path).resolve(), ROOT)
        if (top := name.split("/")[0]) in FOLDERS:
            shown = FOLDERS[top]
            is_section = (ROOT / name).is_file() and not name.endswith(".md")
            after = f"#{anchor(name)})" if is_section else ")"
        elif name in PAGES:
            shown = PAGES[name]
        else:
            shown = os.path.relpath(ROOT / name, DOCS)
        return before + os.path.relpath(DOCS / shown, page.parent) + after

    parts = FENCED.split(text)
    return "".join(part if n % 2 else LINK.sub(target, part) for n, part in enumerate(parts))


def anchor(name: str) -> str:
    """Return the anchor of a heading that is a path, as GitHub and MyST make it."""
    return re.sub(r"[^\w-]", "", name.lower())


def sections(folder: str, page: Path) -> str:
    """Return a section for every file of a folder of the repository, after the text of its README without the title.

    Args:
        folder: folder below the root.
        page: page of ``docs/`` that shows it.
    """
    files = sorted(
        path
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    )
    readme = ROOT / folder / "README.md"
    text = rewritten(readme.read_text().partition("\n")[2], readme.parent, page) if readme in files else ""
    return text + "\n".join(
        f"## `{path.relative_to(ROOT)}`\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n````\n"
        for path in files
        if path.suffix != ".md"
    )


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Include files of the repository, and rewrite the links that leave ``docs/``."""
    page = Path(app.env.doc2path(docname))
    if page.suffix != ".md":
        return

    def included(match: re.Match[str]) -> str:
        path = (page.parent / match[1]).resolve()
        app.env.note_dependency(str(path))
        return rewritten(path.read_text(), path.parent, page)

    text = rewritten(source[0], page.parent, page)
    if docname == "index":  # a pattern of its toctrees may match no page
        text = PATTERN.sub(lambda match: match[0] if any(DOCS.glob(f"{match[0].strip()}.md")) else "", text)
    text = INCLUDE.sub(included, text)
    source[0] = FILES.sub(lambda match: sections(match[1], page), text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
