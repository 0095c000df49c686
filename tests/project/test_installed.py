"""What `make setup` and `make setup-ci` install is here, so that no test is skipped because a package is missing."""

from __future__ import annotations

import re
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
