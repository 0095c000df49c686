"""constraints-oldest.txt pins what pyproject.toml promises."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement

from tests.support.github import ROOT


def pins(name: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def bounds() -> dict[str, str]:
    """Lower bounds of the library and its extras; developers' tools are whatever fits beside them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [
        one for extra in extras if extra not in ("dev", "docs", "ci") for one in extras[extra]
    ]
    lower_bounds = {}
    for requirement in map(Requirement, lines):
        lowest = re.search(r">=([\d.]+)", str(requirement.specifier))
        assert lowest, requirement
        assert lower_bounds.setdefault(requirement.name, lowest[1]) == lowest[1], requirement
    return lower_bounds


def test_the_oldest_versions_are_the_lower_bounds():
    lowest = {name: exact(version) for name, version in bounds().items()}
    oldest = {
        p.name: exact(str(p.specifier).removeprefix("=="))
        for p in pins("constraints-oldest.txt")
        if applies(p)
    }
    assert lowest.items() <= oldest.items()
    # What else is pinned has its reason beside it.
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    assert all("#" in line for line in lines if line and line.split("==")[0] not in lowest)


def test_every_pin_is_within_the_bounds():
    allowed = bounds()
    for pin in (*pins("constraints.txt"), *pins("constraints-oldest.txt")):
        if pin.name in allowed:
            version = str(pin.specifier).removeprefix("==")
            assert exact(version) >= exact(allowed[pin.name]), pin


def applies(pin: Requirement) -> bool:
    """Return whether a pin applies to the oldest Python."""
    return pin.marker is None or pin.marker.evaluate({"python_version": "3.11"})


def exact(version: str) -> tuple[int, ...]:
    return (*map(int, version.split(".")), 0, 0, 0)[:3]
