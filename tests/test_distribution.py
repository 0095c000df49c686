"""Wheel and source distribution hold what they should, and the installed wheel works with nothing but what it declares."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PYTHON = (sys.executable, "-m")
SMALL = {
    "train": ["train.steps=2", "train.eval_batches=1", "sample.length=4"],
    "verify": ["--schedule", "1f1b", "--transport", "threads"],
}
"""What makes the commands that `penstock` suggests shorter."""


def run(words: list[str | Path], folder: Path, **environment: str) -> str:
    """Return the output of a command that must succeed, run in a folder without this process's search path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    told = {
        "cwd": folder,
        "env": inherited | environment,
        "capture_output": True,
        "text": True,
        "timeout": 300,
    }
    done = subprocess.run(list(map(str, words)), **told)
    assert done.returncode == 0, f"{words}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked_files() -> list[str]:
    """Return the files that git has, which are those of a fresh clone."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository: what is distributed is compared with it")
    names = run(["git", "ls-files", "-z"], ROOT).split("\0")
    return sorted(name for name in names if (ROOT / name).is_file())


def requirements(installed: Distribution) -> set[str]:
    """Return the packages that a distribution needs here, without its extras, and what these need, and so on."""
    from packaging.requirements import Requirement

    names: set[str] = set()
    waiting = [installed]
    while waiting:
        for text in waiting.pop().requires or ():
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if requirement.name in names or not applies:
                continue
            names.add(requirement.name)
            try:
                waiting.append(distribution(requirement.name))
            except PackageNotFoundError:
                pytest.fail(f"{requirement.name} is declared and not installed here")
    return names


class Built:
    """The distributions of a fresh clone, and the wheel installed.

    The wheel is built from the source distribution. Its environment has links to the packages that it requires and to no
    others, so nothing is downloaded or copied.
    """

    def __init__(self, folder: Path) -> None:
        self.files = tracked_files()
        clone, dist = folder / "clone", folder / "dist"
        for name in self.files:
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
        run([*PYTHON, "build", "--no-isolation", "--outdir", dist, clone], folder)
        (self.wheel,) = dist.glob("*.whl")
        (self.sdist,) = dist.glob("*.tar.gz")
        self.environment = folder / "environment"
        self._install()

    def _install(self) -> None:
        venv.create(self.environment, symlinks=True)
        self.python = self.environment / "bin" / "python"
        run([*PYTHON, "pip", "--python", self.python, "install", "--no-deps", "--quiet", self.wheel], ROOT)
        (site,) = (self.environment / "lib").glob("python*/site-packages")
        (metadata,) = site.glob("penstock_torch-*.dist-info")
        self.requirements = requirements(PathDistribution(metadata))
        for name in self.requirements:
            package = distribution(name)
            for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                (site / top).symlink_to(package.locate_file(top))

    def penstock(self, words: list[str], folder: Path) -> str:
        return run([self.environment / "bin" / "penstock", *words], folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("distribution"))


def test_the_index_would_take_both_and_the_wheel_is_well_formed(built: Built, tmp_path: Path):
    checked = run([*PYTHON, "twine", "check", "--strict", built.wheel, built.sdist], tmp_path)
    assert checked.count("PASSED") == 2
    assert "OK" in run([Path(sys.executable).parent / "check-wheel-contents", built.wheel], tmp_path)


def test_the_wheel_has_the_package_and_nothing_else(built: Built):
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {name.removeprefix("src/") for name in built.files if name.startswith("src/")}
    assert {"py.typed", "show/templates/page.html", "plan/clusters/h100.toml"} <= {
        name.removeprefix("penstock/") for name in names
    }


def test_the_source_distribution_is_the_repository(built: Built, tmp_path: Path):
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    names = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert names - {"PKG-INFO"} == set(built.files)
    # It can run its tests.
    quick = ["tests/base/test_atomic.py", "tests/cli/test_main.py::test_it_names_commands_that_exist"]
    words = [*PYTHON, "pytest", "-p", "no:cacheprovider", "-rA", *quick]
    printed = run(words, source, PYTHONPATH=f"{source / 'src'}{os.pathsep}{source}")
    assert "PASSED tests/cli/test_main.py" in printed


def test_the_wheel_requires_little(built: Built):
    """A new name here is a longer first minute: CONTRIBUTING says why each direct one is needed."""
    assert {"torch", "numpy", "click", "rich", "pydantic", "tomli-w", "jinja2"} <= built.requirements
    assert not {"numba", "bokeh", "matplotlib", "transformers", "pytest"} & built.requirements
    assert "No broken requirements" in run([*PYTHON, "pip", "--python", built.python, "check"], ROOT)


@pytest.mark.exhaustive  # the next one runs a command of the wheel, too
def test_the_installed_commands_do_what_penstock_suggests(built: Built, tmp_path: Path):
    suggested = re.findall(r"^    penstock (.*)$", built.penstock([], tmp_path), re.M)
    assert len(suggested) == 4
    printed = {}
    for command in suggested:
        name, *words = shlex.split(command)
        printed[name] = built.penstock([name, *words, *SMALL.get(name, [])], tmp_path)
    assert "kept in runs/first" in printed["train"]
    assert "pip install 'penstock-torch[report]'" in printed["train"]  # Bokeh is an extra
    assert "1f1b, 2 ranks" in printed["trace"]
    assert "no tensor differs by more than allowed" in printed["verify"]
    assert "written: run.toml" in printed["plan"]


def test_the_installed_package_is_the_one_that_runs(built: Built, tmp_path: Path):
    assert "makespan" in built.penstock(["simulate", "1f1b", "-p", "4", "-m", "8"], tmp_path)
    where = run([built.python, "-c", "import penstock; print(penstock.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(built.environment)
