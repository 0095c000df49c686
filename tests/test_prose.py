"""Rules of the prose that a machine can check: CONTRIBUTING says how docstrings, comments and errors are written."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
FIRST = re.compile(r"(What|How|Whether|Who|Which)\b")
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node) or ""
            assert not FIRST.match(docstring), docstring.splitlines()[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_phrase_reads_as_if_it_were_translated(path: Path):
    phrases = [f"line {line}: {match[0]!r}" for line, text in texts(path) for match in PHRASES.finditer(text)]
    assert not phrases
