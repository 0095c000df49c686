"""Packages: those that tests need are here, hints to install name what there is, and the pins keep to the bounds."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.requirements import Requirement

from tests.support.github import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def missing(*extras: str) -> list[str]:
    """Return the requirements of these extras that what is installed does not satisfy."""
    return [text for extra in extras for text in EXTRAS[extra] if not satisfied(Requirement(text))]


def satisfied(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def test_the_fast_tests_have_their_packages():
    assert missing("dev") == []


@pytest.mark.slow
def test_the_other_tests_have_their_packages():
    assert missing("dev", "docs", "ci") == []


def test_a_missing_package_and_an_old_version_are_noticed():
    assert not satisfied(Requirement("no-such-package"))
    assert not satisfied(Requirement("pytest>=1000"))


def test_every_hint_to_install_names_the_distribution_and_an_extra_that_it_has():
    # The penstock of PyPI is another project: a hint without -torch would install it. `{name}` is filled in at run time.
    wrong = []
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]:
        for hint, extra in re.findall(
            r"(pip install '?(?:penstock[\w-]*)\[([^\]]*)\])", path.read_text(encoding="utf-8")
        ):
            if f"{PROJECT['name']}[" not in hint or extra not in {*EXTRAS, "{name}"}:
                wrong.append(f"{path.relative_to(ROOT)}: {hint}")
    assert wrong == []


def pins(name: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def bounds() -> dict[str, str]:
    """Lower bounds of the library and its extras; developers' tools are whatever fits beside them."""
    ours = EXTRAS.keys() - {"dev", "docs", "ci"}
    lower_bounds: dict[str, str] = {}
    lines = PROJECT["dependencies"] + [line for extra in ours for line in EXTRAS[extra]]
    for requirement in map(Requirement, lines):
        lowest = re.search(r">=([\d.]+)", str(requirement.specifier))
        assert lowest, requirement
        assert lower_bounds.setdefault(requirement.name, lowest[1]) == lowest[1], requirement
    return lower_bounds


def test_the_oldest_versions_are_the_lower_bounds():
    lowest = {name: exact(version) for name, version in bounds().items()}
    # Those that apply to the oldest Python.
    pinned = [
        pin
        for pin in pins("constraints-oldest.txt")
        if pin.marker is None or pin.marker.evaluate({"python_version": "3.11"})
    ]
    oldest = {pin.name: exact(str(pin.specifier).removeprefix("==")) for pin in pinned}
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


def exact(version: str) -> tuple[int, ...]:
    return (*map(int, version.split(".")), 0, 0, 0)[:3]


@pytest.mark.slow
def test_what_commands_make_is_ignored_by_git():
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    made = [
        ".venv/x",
        ".venv-oldest/x",
        "dist/x.whl",
        "build/x",
        "runs/a/run.json",
        "src/penstock.egg-info/x",
        ".coverage",
    ]
    words = [
        "git",
        "check-ignore",
        "--no-index",
        *made,
        "tools/release_check.py",
        ".github/workflows/tests.yml",
    ]
    checked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert checked.stdout.split() == made
