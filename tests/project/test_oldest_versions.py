"""constraints-oldest.txt pins what pyproject.toml promises, and nothing else."""

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
        one for extra in extras if extra not in ("dev", "docs") for one in extras[extra]
    ]
    lowest_of = {}
    for requirement in map(Requirement, lines):
        lowest = re.search(r">=([\d.]+)", str(requirement.specifier))
        assert lowest, requirement
        assert lowest_of.setdefault(requirement.name, lowest[1]) == lowest[1], requirement
    return lowest_of


def test_the_oldest_versions_are_the_lower_bounds():
    oldest = {
        p.name: str(p.specifier).removeprefix("==") for p in pins("constraints-oldest.txt") if applies(p)
    }
    assert {name: exact(version) for name, version in bounds().items()} == {
        name: exact(version) for name, version in oldest.items()
    }


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
