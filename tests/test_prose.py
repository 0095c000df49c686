"""Rules of the prose that a machine can check: CONTRIBUTING says how docstrings, comments and errors are written."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import penstock

SOURCE = Path(penstock.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
FIRST = re.compile(r"(?:What|How|Whether|Who|Which)\b")
PHRASES = re.compile(
    r"\b(whoever|nobody's|nobody|anew|in vain|in hand|of which|with which|for whom|goes on|to be cut)\b"
    r"|(?<!there )\bis no (?!longer|news|fault|error|baseline|padding|such)\w",
    re.I,
)


def texts(path: Path) -> list[tuple[int, str]]:
    """(line, text) of every comment and every string of a file."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [(token.start[0], token.string) for token in tokens if token.type in kinds]


def test_docstrings_begin_with_a_verb_or_a_noun():
    offenders = []
    for path in FILES:
        text = path.read_text()
        if not re.search(rf'"""\s*{FIRST.pattern}', text):  # few files have to be read as Python
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node) or ""
                if FIRST.match(docstring):
                    offenders.append(f"{path.relative_to(SOURCE)}: {docstring.splitlines()[0]}")
    assert not offenders


def test_no_phrase_reads_as_if_it_were_translated():
    offenders = [
        f"{path.relative_to(SOURCE)}:{line}: {match[0]!r}"
        for path in FILES
        if PHRASES.search(path.read_text())
        for line, text in texts(path)
        for match in PHRASES.finditer(text)
    ]
    assert not offenders
