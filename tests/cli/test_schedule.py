from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli.schedule import command
from penstock.schedule.families import FAMILIES, build_schedule
from penstock.schedule.text import read_csv, write_csv


def run(*words: object) -> Result:
    result = CliRunner().invoke(command, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_list_has_source_needs_bubble_and_peak_of_every_family():
    lines = run("list", "-p", 4, "-m", 8).output.splitlines()
    at = lines.index("zb-h1             Zero Bubble, 2401.10241; any counts; split backward")
    assert lines[at + 1] == "  bubble  3                       (p-1)(F+B-W), m ≥ p, W ≤ F"
    assert lines[at + 2] == "  peak    4                       min(p, m)"
    names = [line.split()[0] for line in lines if line and not line.startswith((" ", "4 ranks", "Peak"))]
    assert names == list(FAMILIES)


def test_the_list_for_a_program_has_formulas_and_what_was_measured():
    report = json.loads(run("list", "-p", 4, "-m", 8, "-v", 4, "--json").output)
    assert (report["ranks"], report["microbatches"]) == (4, 8)
    rows = {row["name"]: row for row in report["families"]}
    assert list(rows) == list(FAMILIES)
    assert rows["interleaved-1f1b"]["virtual_stages"] == 4
    assert rows["interleaved-1f1b"]["bubble"] == {"formula": "(p-1)(F+B+W)/v, m ≥ p", "value": 2.25}
    assert rows["interleaved-1f1b"]["options"] == ["group_size"]
    assert rows["1f1b"]["peak"] == {"formula": "min(p-r, m)", "value": [4, 3, 2, 1]}
    assert rows["v-min"]["bubble"]["value"] == 5.5
    assert rows["dualpipe"]["in_order"] is False
    assert all(row["refused"] is None for row in rows.values())


@pytest.mark.slow
def test_the_list_says_which_counts_a_family_refuses():
    rows = json.loads(run("list", "-p", 3, "-m", 2, "-v", 3, "--json").output)["families"]
    refusing = {row["name"]: row["refused"] for row in rows if row["refused"]}
    assert list(refusing) == ["dualpipe", "chimera", "hanayo"]
    assert "even number of ranks, got 3" in refusing["dualpipe"]
    assert "even number of ranks, got 3" in run("list", "-p", 3, "-m", 2).output


def test_show_prints_the_ops_of_every_rank_or_what_it_carries_out():
    assert run("show", "1f1b", "-p", 2, "-m", 3).output == (
        "1f1b: 2 ranks, 2 stages, 3 microbatches\n\n"
        "rank 0  0F0 0F1 0B0 0F2 0B1 0B2\n"
        "rank 1  1F0 1B0 1F1 1B1 1F2 1B2\n"
    )
    lines = run("show", "chimera", "-p", 2, "-m", 2, "--program").output.splitlines()
    assert lines[:4] == [
        "rank 0",
        "  post #0 for 1F1 from rank 1",
        "  post #1 for 0B0 from rank 1",
        "  run 0F0",
    ]
    assert sum("reduce stage" in line for line in lines) == 4
    for words in ((), *((name,) for name in command.commands)):
        assert "Example" in run(*words, "--help").output


def test_check_says_what_was_proved_and_counts_bytes_if_given_them():
    assert run("check", "zb-h1", "-p", 2, "-m", 4).output == (
        "zb-h1: 2 ranks, 2 stages, 4 microbatches: valid\n"
        "24 ops (8 F, 8 I, 8 W), each once and after its inputs; the longest chain of waits has 13 ops\n"
        "8 messages between ranks; no deadlock, even if every send blocks; at most 2 receives posted ahead on an edge\n"
        "peak activations on every rank: 2\n"
    )
    report = json.loads(run("check", "dualpipe", "-p", 4, "-m", 8, "--json").output)
    assert report["valid"] is True
    assert report["peak"] == [5, 5, 5, 5]
    assert report["reduced_over"] == {"0": [0, 3], "1": [1, 2], "2": [2, 1], "3": [3, 0]}
    copied = "every copied stage is reduced once on each of its ranks"
    assert copied in run("check", "dualpipe", "-p", 2, "-m", 4).output
    words = ("check", "zb-h2", "-p", 2, "-m", 6, "--saved", "100,200", "--waiting", 30, "--freed-at", "B")
    assert json.loads(run(*words, "--json").output)["peak"] == [300, 260]
    assert "peak bytes by rank: 300 260" in run(*words, "--memory-limit", 300).output


def test_check_of_a_bad_file_is_an_answer_a_program_can_read(tmp_path: Path):
    (tmp_path / "bad.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    result = run("check", tmp_path / "bad.csv", "--json")
    assert result.exit_code == 2
    answer = json.loads(result.output)
    assert answer["valid"] is False
    assert "rank 0 is blocked at 0B0, which needs 1B0 of rank 1" in answer["error"]


def test_csv_is_written_and_read_back(tmp_path: Path):
    path = tmp_path / "hanayo.csv"
    assert run("csv", "hanayo", "-p", 2, "-m", 2).output == (
        "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n"
    )
    assert run("csv", "hanayo", "-p", 2, "-m", 2, "--out", path).output.endswith(f"written to {path}\n")
    assert read_csv(path) == build_schedule("hanayo", 2, 2)
    assert "valid" in run("check", path, "-p", 2, "-m", 2, "-v", 2).output
    assert run("csv", path).output == path.read_text()


GPIPE = ("gpipe", "-p", 2, "-m", 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "1f1n", "-p", 2, "-m", 2), "no schedule family '1f1n' (did you mean '1f1b'"),
        (("show", "1f1b", "-p", 2), "1f1b is a family and needs --microbatches"),
        (("draw", "1f1b", "-m", 2), "1f1b is a family and needs --ranks"),
        (("show", *GPIPE, "-o", "speed"), "--option must be NAME=VALUE, such as group_size=4, got 'speed'"),
        (("check", *GPIPE, "--saved", "1,x"), "--saved must be a whole number of bytes, or one per stage"),
        (("check", *GPIPE, "--saved", "1,2,3"), "saved has shape (3,)"),
        (
            ("check", *GPIPE, "--memory-limit", 1),
            "rank 0 holds 2 after 0F1, op 2 of its list, and may hold 1",
        ),
        (("check", "none.csv"), "cannot read the schedule none.csv"),
        (("check", "odd.csv"), "odd.csv: line 2, column 2: '1RESHAPE' is not an op"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, says, tmp_path: Path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.csv").write_text("0F0,0B0\n1F0,1RESHAPE,1B0\n")
    assert says in refused("schedule", *words)


def test_a_file_says_its_own_counts(tmp_path: Path, refused):
    path = tmp_path / "s.csv"
    write_csv(build_schedule("zb-v", 2, 3), path)
    assert run("show", path, "-p", 2, "-m", 3, "-v", 2).exit_code == 0
    said = refused("schedule", "show", path, "-m", 4)
    assert "is a schedule of 3 microbatches, not 4; leave the option out" in said
    said = refused("schedule", "show", path, "-o", "a=1")
    assert "is a file, whose only option is backward=auto|full|input, got 'a'" in said
