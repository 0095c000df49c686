"""A release needs a tag, a version, a changelog and a citation that agree."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tools.release_check import ROOT, disagreements, releases, version

import penstock


@pytest.fixture
def root(tmp_path):
    (tmp_path / "src/penstock/base").mkdir(parents=True)
    (tmp_path / "src/penstock/base/version.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 - 2026-01-31\n\n## 1.2.2 - 2026-01-01\n")
    (tmp_path / "CITATION.cff").write_text("version: 1.2.3\n")
    return tmp_path


def test_what_agrees_may_be_published_as_a_candidate_too(root):
    assert disagreements("v1.2.3", root) == []
    (root / "src/penstock/base/version.py").write_text('__version__ = "1.2.3rc1"\n')
    (root / "CITATION.cff").write_text("version: 1.2.3rc1\n")
    assert disagreements("v1.2.3rc1", root) == []


@pytest.mark.parametrize(
    ("file", "text", "tag", "reason"),
    [
        ("CITATION.cff", "version: 1.2.3\n", "v1.2.4", "the tag must be v1.2.3, got v1.2.4"),
        ("CITATION.cff", "version: 1.2.2\n", "v1.2.3", "version in CITATION.cff must be 1.2.3, got 1.2.2"),
        ("CHANGELOG.md", "## Unreleased\n", "v1.2.3", "the newest version in CHANGELOG.md must be 1.2.3, got none"),
        ("CHANGELOG.md", "## 1.2.2 - 2026-01-01\n", "v1.2.3", "must be 1.2.3, got 1.2.2"),
        ("CHANGELOG.md", "## 1.2.3\n", "v1.2.3", "must have a date"),
        ("src/penstock/base/version.py", '__version__ = "1.2.3.dev1"\n', "v1.2.3.dev1", "must be like 1.2.3"),
    ],
)  # fmt: skip
def test_what_does_not_agree_is_named(root, file, text, tag, reason):
    (root / file).write_text(text)
    assert any(reason in line for line in disagreements(tag, root))


@pytest.mark.slow
def test_the_command_needs_no_installation():
    check = [sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, '.'); sys.argv[1:] = ['v0.0.0']\n"
             "from tools.release_check import main; main()"]  # fmt: skip
    result = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert f"the tag must be v{penstock.__version__}, got v0.0.0" in result.stdout


def test_this_version_is_cited():
    assert version() == penstock.__version__
    assert f"version: {version()}\n" in (ROOT / "CITATION.cff").read_text()
    assert all(number != version() or date for number, date in releases((ROOT / "CHANGELOG.md").read_text()))
