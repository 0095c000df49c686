"""Print the size of the code and of the documentation: ``make report``, or ``python -m tools.house [--files]``.

A line of code is one that is neither blank, a comment, part of a docstring, nor part of an import. Comments
beside code are not counted.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"
DOCS = ROOT / "docs"
GENERATED = ("config.md", "trust.md", "gallery.md", "results.md", "security.md", "reference/", "notebooks/")
"""Pages that commands or Sphinx make, or that show another file; parts of other pages between ``<!-- from ... -->`` and
``<!-- end -->`` are made, too."""
SMALL = 90
"""Lines up to which a file that one other file imports is listed."""
_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class FileSize:
    """Lines of a file."""

    path: Path
    lines: int
    code: int
    comments: int

    @property
    def name(self) -> str:
        """Path below the package."""
        return self.path.relative_to(SOURCE).as_posix()


def measure(path: Path) -> FileSize:
    """Count the lines of a file."""
    text = path.read_text()
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            docstring = node.body[0]
            code.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return FileSize(path, len(text.splitlines()), len(code), len(comments - code))


def importers() -> dict[str, set[str]]:
    """Return the modules of the package that import each module, by dotted name."""
    names = {}
    for path in SOURCE.rglob("*.py"):
        dotted = ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts))
        names[dotted.removesuffix(".__init__")] = path
    found: dict[str, set[str]] = defaultdict(set)
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            used: set[str] = set()
            if isinstance(node, ast.Import):
                used = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                used = {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
            for module in used & names.keys() - {name}:
                found[module].add(name)
    return found


def words() -> dict[str, int]:
    """Return the words of every page of the documentation, as ``wc -w`` counts them, without what is generated."""
    counts = {}
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).as_posix()
        if not name.startswith((*GENERATED, "_build/", "gallery/")):
            written = re.sub(r"<!-- from .*?<!-- end -->", "", path.read_text(), flags=re.DOTALL)
            counts[name] = len(written.split())
    return counts


def main() -> None:
    """Print totals, and with ``--files`` every file."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description="size of the code")
    parser.add_argument("--files", action="store_true", help="print every file and page, the largest first")
    options = parser.parse_args()
    sizes = sorted(map(measure, SOURCE.rglob("*.py")), key=lambda size: -size.lines)
    lines, code = sum(s.lines for s in sizes), sum(s.code for s in sizes)
    comments = sum(s.comments for s in sizes)
    by_module = importers()
    alone = [s for s in sizes if s.lines <= SMALL and len(by_module[_dotted(s.path)]) == 1]
    if options.files:
        for size in sizes:
            print(f"{size.lines:5} {size.code:5} {len(by_module[_dotted(size.path)]):3} {size.name}")
    print(f"{lines:,} lines, {code:,} of code, in {len(sizes)} files")
    print(f"{comments:,} comment lines, {comments / code:.2%} of the lines of code")
    print(f"{len(alone)} files of at most {SMALL} lines that one other file imports")
    print(f"largest: {', '.join(f'{s.name} ({s.lines})' for s in sizes[:5])}")
    pages = words()
    if options.files:
        for name, count in sorted(pages.items(), key=lambda page: -page[1]):
            print(f"{count:5} words docs/{name}")
    print(f"{sum(pages.values()):,} words in {len(pages)} pages of docs/, generated ones left out")


def _dotted(path: Path) -> str:
    return ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


if __name__ == "__main__":
    main()
