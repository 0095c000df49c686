"""Check that a tag, the version, the changelog and the citation agree: ``python -m tools.release_check v1.2.3``.

Needs nothing but Python, so that a release starts without an installation.
"""

from __future__ import annotations

import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
_HEADING = re.compile(r"^## \[?(\d+\.\d+\.\d+)\]?(?: - (\S+))?", re.M)


def version(root: Path = ROOT) -> str:
    """Return the version in the sources."""
    match = re.search(r'^__version__ = "(.+)"$', (root / "src/penstock/base/version.py").read_text(), re.M)
    assert match is not None
    return match[1]


def releases(changelog: str) -> list[tuple[str, str]]:
    """Return the versions that a changelog lists, newest first, with their dates (empty if missing)."""
    return [(match[1], match[2] or "") for match in _HEADING.finditer(changelog)]


def disagreements(tag: str, root: Path = ROOT) -> list[str]:
    """Return one line for everything that does not fit a tag; an empty list if the release may be published."""
    faults = []
    here = version(root)
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", here):
        faults.append(
            f"__version__ must be like 1.2.3 or 1.2.3rc1, got {here}; change src/penstock/base/version.py"
        )
    if tag != f"v{here}":
        faults.append(f"the tag must be v{here}, got {tag}; tag the commit whose __version__ it names")
    base = re.split(r"a|b|rc", here)[0]
    listed = releases((root / "CHANGELOG.md").read_text())
    if not listed or listed[0][0] != base:
        faults.append(
            f"the newest version in CHANGELOG.md must be {base}, got {listed[0][0] if listed else 'none'}; turn "
            f"'## Unreleased' into '## {base} - {date.today().isoformat()}'"
        )
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", listed[0][1]):
        faults.append(f"'## {base}' in CHANGELOG.md must have a date, as in '## {base} - 2026-01-31'")
    cited = re.search(r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.M)
    if cited is None or cited[1].strip("\"'") != here:
        faults.append(f"version in CITATION.cff must be {here}, got {cited[1] if cited else 'none'}")
    return faults


def main() -> None:
    """Print what does not agree and exit with 1, or exit with 0."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.release_check TAG")
    faults = disagreements(sys.argv[1])
    print("\n".join(faults) or f"{sys.argv[1]} may be published")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
