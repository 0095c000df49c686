"""Commands replace their own files, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.base.output_files import PAGE, OutputFile, require_outputs, signed, signed_kind
from penstock.cli import group
from tests.support.measured import kept_run

KIND = signed_kind("penstock make", "# Made.")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("my notes\n")
    return tmp_path


def refusal(*outputs: OutputFile, inputs: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as error:
        require_outputs(outputs, inputs)
    return str(error.value)


def output(name: str, option: str = "--out") -> OutputFile:
    return OutputFile(option, Path(name), KIND)


def test_a_signed_file_is_replaced_until_it_is_edited(folder: Path):
    path = folder / "made.toml"
    text = signed("# Made.\nx = 1\n")
    for content in ("", text):
        path.write_text(content)
        require_outputs([output("made.toml"), None])
    for edited in (text.replace("1", "2", 1), text + "y = 2\n", text[:-1], "# Made.\nx = 1\n"):
        path.write_text(edited)
        assert "was edited after penstock make wrote it; delete it, or give another --out" in refusal(
            output("made.toml")
        )
    path.write_text("x = 1\n")
    assert "made.toml exists and was not written by penstock make" in refusal(output("made.toml"))


def test_inputs_and_other_outputs_are_not_replaced(folder: Path):
    (folder / "made.toml").write_text(signed("# Made.\n"))
    (folder / "link.toml").symlink_to("made.toml")
    assert "--out must not replace link.toml, which this command reads" in refusal(
        output("link.toml"), inputs=("missing", "made.toml")
    )
    twice = refusal(output("new.toml"), OutputFile("--html", Path("./new.toml"), PAGE))
    assert twice == "--out and --html both write new.toml; give them different paths"


def test_paths_that_are_no_file_are_refused_and_devices_are_not():
    for name, message in {
        "": "must be the path of a file, got the folder '.'",
        "-": "--out /dev/stdout prints it",
        "no/x": "there is no folder no",
        "a\0": "null character",
    }.items():
        assert message in refusal(output(name))
    require_outputs([output("/dev/null")])


SCHEDULE = "1f1b -p 2 -m 4"


@pytest.mark.parametrize(
    "words",
    [
        "trace run --html notes.txt",
        "trace run --out notes.svg",
        "trace run --costs notes.txt",
        f"simulate {SCHEDULE} --html notes.txt",
        "simulate mine.csv --html mine.csv",
        "schedule csv mine.csv --out mine.csv",
        f"schedule csv {SCHEDULE} --out notes.txt",
        f"schedule draw {SCHEDULE} --out notes.svg",
    ],
)
def test_no_command_replaces_a_file_of_another_kind(folder: Path, words: str):
    kept_run(folder).rename(folder / "run")
    (folder / "notes.svg").write_text("my notes\n")
    (folder / "mine.csv").write_text("0F0,0B0\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcome = CliRunner().invoke(group, words.split())
    assert isinstance(outcome.exception, ConfigError)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "trace run --html page.html --out step.json --costs costs.toml",
        "trace run --out step.png --costs costs.json",
        f"simulate {SCHEDULE} --html page.html",
        f"schedule csv {SCHEDULE} --out mine.csv",
        f"schedule draw {SCHEDULE} --out step.pdf",
    ],
)
def test_every_command_replaces_its_own_files(folder: Path, words: str):
    kept_run(folder).rename(folder / "run")
    for _ in range(2):
        outcome = CliRunner().invoke(group, words.split())
        assert outcome.exit_code == 0, outcome.exception
