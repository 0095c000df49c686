"""Files that ``penstock plan`` writes, those that it refuses to replace, and the command that starts a run."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from penstock.cli.plan import command
from penstock.cli.plan_files import start_of_script
from penstock.plan.cluster import read_cluster
from penstock.plan.prediction import Prediction, predict
from penstock.profile.model_profile import of_shape
from tests.support.lanes import exhaustive
from tests.support.plan_inputs import CLUSTER, GPT2, write_inputs
from tests.support.planning import SMALL, timed_profile

WORDS = ("gpt2", "-c", "cluster.toml", "-b", "8", "--layout", "pp=2")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path, CLUSTER.replace('dtype = "fp32"\n', ""), gpt2=GPT2)
    return tmp_path


def invoke(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def planned(*words: str) -> str:
    outcome = invoke(*words)
    assert outcome.exit_code == 0, outcome.exception or outcome.output
    return outcome.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--html", "gpt2/config.json"), "gpt2/config.json, which this command reads"),
        (("--out", "cluster.toml"), "cluster.toml, which this command reads"),
        (("--html", "notes.txt"), "notes.txt exists and is not a page of Penstock"),
        (("--html", "same", "--out", "same"), "--out and --html both write same"),
        (("--html", ""), "--html must be the path of a file, got the folder"),
        (("--out", "run.toml"), "run.toml exists and was edited after penstock plan wrote it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_files_of_others_stay_as_they_are(folder: Path, words: tuple[str, ...], reason: str):
    planned(*WORDS, "--out", "run.toml")
    edited = (folder / "run.toml").read_text().replace("[data]\n", '[data]\npath = "texts"\n')
    (folder / "run.toml").write_text(edited)
    (folder / "notes.txt").write_text("my notes\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert reason in str(invoke(*WORDS, *words).exception)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_plan_of_its_own_config_needs_another_path():
    planned(*WORDS, "--out", "run.toml")
    assert "must not replace run.toml" in str(invoke("run.toml", "-c", "cluster.toml").exception)
    planned("run.toml", "-c", "cluster.toml", "--layout", "dp=2", "--out", "other.toml")
    assert tomllib.loads(Path("other.toml").read_text())["parallel"]["dp"] == 2


@pytest.mark.slow
def test_the_files_are_complete_if_the_reader_is_gone(folder: Path):
    words = [sys.executable, "-m", "penstock", *WORDS[:-2], "--out", "run.toml", "--html", "page.html"]
    words.insert(3, "plan")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        process.wait(timeout=300)
    tomllib.loads((folder / "run.toml").read_text())
    assert (folder / "page.html").read_text().endswith("</html>")


@pytest.mark.slow
def test_a_full_disk_is_one_line():
    command = [sys.executable, "-m", "penstock", "plan", *WORDS]
    with Path("/dev/full").open("w") as full:
        outcome = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert outcome.returncode == 1
    assert outcome.stderr == "penstock: cannot write to stdout: No space left on device\n"


def test_the_config_has_what_was_assumed(folder: Path):
    (folder / "own.toml").write_text(
        '[model]\nlayers = 4\n\n[runtime]\nprecision = "bf16"\nrecompute = "full"\n'
    )
    words = ("own.toml", "-c", "cluster.toml", "-b", "8", "-s", "16", "--out", "run.toml", "--layout")
    for layout, precision, recompute in (
        ("pp=2,dtype=fp32", "fp32", "none"),
        ("pp=2,dtype=bf16,recompute=2", "bf16-weights", 2),
        ("pp=2,recompute=selective", "bf16-weights", "none"),
    ):
        planned(*words, layout)
        runtime = tomllib.loads((folder / "run.toml").read_text())["runtime"]
        assert runtime == {"precision": precision, "recompute": recompute}
    output = planned(*words, "dp=2,attention=unfused,overlap=false")
    assert "note:    attention=unfused: the run has fused attention" in output
    assert "# overlap=false: the run reduces gradients" in (folder / "run.toml").read_text()


@pytest.mark.parametrize("dtype", ["fp8", *exhaustive("fp16")])
def test_a_dtype_that_no_run_has_is_only_predicted(folder: Path, dtype: str):
    cluster = (folder / "cluster.toml").read_text().replace("fp16 = 2e10", "fp16 = 2e10, fp8 = 3e10")
    (folder / "cluster.toml").write_text(cluster)
    words = ("gpt2", "-c", "cluster.toml", "-b", "8", "--fix", "pp=2", "--fix", f"dtype={dtype}")
    said = f"There is no run.toml: penstock plan starts runs in fp32 or bf16, not in {dtype}"
    assert said in planned(*words)
    (folder / "cluster.toml").write_text(f'dtype = "{dtype}"\n{cluster}')
    refused = str(invoke(*words[:-2], "--out", "run.toml").exception)
    assert refused.startswith("cannot write run.toml: penstock plan starts runs in")
    assert not (folder / "run.toml").exists()


def test_a_limit_of_memory_is_at_most_the_memory_and_a_layout_has_values():
    words = ("gpt2", "-c", "h100*2", "-b", "8", "--layout", "pp=2", "--memory-limit")
    refused = str(invoke(*words, "900GB").exception)
    assert "at most 80 GB, the memory of a device of h100, got 900 GB" in refused
    assert "devices of 70 GB" in planned(*words, "70GB")
    outcome = invoke(*WORDS[:-1], "")
    assert outcome.exit_code == 2
    assert "--layout must have at least one value" in outcome.stderr


def test_a_fixed_value_counts_before_the_others_are_known():
    words = ("gpt2", "-c", "h100*2", "-b", "8", "--fix", "tp=2", "--json", "--fix")
    for fixed in ("sequence_parallel=true", "sequence_parallel=false"):
        plans = json.loads(planned(*words, fixed))["plans"]
        assert {str(plan["layout"]["sequence_parallel"]).lower() for plan in plans} == {fixed.split("=")[1]}


def started(layout: str, cluster: str) -> tuple[list[str], Prediction]:
    plan = predict(of_shape(SMALL), read_cluster(cluster), layout, sequence=32, batch=48)
    return start_of_script("run.py", plan), plan


@pytest.mark.parametrize(
    ("layout", "cluster"),
    [
        # One node, full and not; two full nodes; a last node that is not full.
        ("dp=8", "h100*8"), ("dp=3", "h100*8x4"), ("pp=8,dp=2", "h100*8x4"), ("dp=3", "h100*2x2"),
        ("dp=3,pp=8", "h100*10x3"),
    ],
)  # fmt: skip
def test_as_many_processes_are_started_as_the_layout_has_devices(layout: str, cluster: str):
    lines, plan = started(layout, cluster)
    processes = 0
    for line in (line for line in lines if line.startswith("torchrun")):
        words = line.split()
        nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
        each = int(words[words.index("--nproc-per-node") + 1])
        assert each <= read_cluster(cluster).ranks_per_node
        processes += each if "--node-rank" in words else nodes * each
    assert processes == plan.layout.devices


def test_many_nodes_of_which_the_last_has_fewer_processes():
    lines, _ = started("pp=4,dp=3", "h100*5x4")
    assert lines == [
        "the last node has 2 of the 12 processes; HOST is node 0:",
        "torchrun --nnodes 3 --node-rank 0 --master-addr HOST --nproc-per-node 5 run.py",
        "torchrun --nnodes 3 --node-rank 1 --master-addr HOST --nproc-per-node 5 run.py",
        "torchrun --nnodes 3 --node-rank 2 --master-addr HOST --nproc-per-node 2 run.py",
    ]
    cluster = read_cluster("cluster.toml*3x6")
    plan = predict(timed_profile(16), cluster, "pp=16", batch=48)
    assert "... and so on up to --node-rank 4" in start_of_script("run.py", plan)


def test_the_data_of_the_run_are_said(folder: Path):
    words, start = (*WORDS, "--out", "run.toml"), "data:    "
    assert f"{start}the bytes of the source of Python's standard library; set data.path" in planned(*words)
    for vocabulary, said in (
        (1000, "the bytes of the source"),
        (100, "none yet: there is no tokenizer.json in"),
    ):
        (folder / "gpt2" / "config.json").write_text(json.dumps(GPT2 | {"vocab_size": vocabulary}))
        assert start + said in planned(*words)
    (folder / "gpt2" / "tokenizer.json").write_text("{}")
    assert f"{start}the source of Python's standard library; set data.path=FOLDER" in planned(*words)
    (folder / "gpt2" / "tokenizer.json").unlink()
    (folder / "gpt2" / "model.safetensors").write_bytes(b"")
    assert f"{start}none yet" in planned(*words)
    (folder / "own.toml").write_text('[model]\nconfig = "gpt2"\n\n[data]\npath = "tokens"\n')
    assert start not in planned("own.toml", *WORDS[1:], "--out", "own-run.toml")


@pytest.mark.slow
def test_a_narrow_terminal_has_fewer_columns_and_whole_cells(monkeypatch: pytest.MonkeyPatch):
    for width, shown in ((60, 9), (80, 12), (200, 14)):
        monkeypatch.setattr("penstock.cli.plan_text.table_console", lambda width=width: Console(width=width))
        lines = planned("gpt2", "-c", "h100*4", "-b", "16", "--out", "run.toml").splitlines()
        table = lines[lines.index("") + 1 :][:11]  # below the headline
        assert len(table[0].split()) <= shown
        assert {"pp", "dp", "tp", "schedule", "step", "memory"} <= set(table[0].split())
        assert not any("…" in line for line in table)
        assert max(map(len, table)) <= width


UNLIKE = ("gpt2", "-s", "64", "-b", "8", "--cluster", "rtx-4090*1+rtx-3090*1")


def test_a_run_on_unlike_devices_has_their_split_and_starts_in_their_order(folder: Path):
    text = planned(*UNLIKE, "--layout", "pp=2,split=5+3", "--out", "run.toml", "--html", "plan.html")
    lines = [line.removeprefix("start:").strip() for line in text[text.index("start:") :].splitlines()]
    start = "torchrun --nnodes 2 --master-addr HOST --node-rank"
    assert lines[1:] == [
        f"{start} 0 --nproc-per-node 1 -m penstock train run.toml  # rtx-4090",
        f"{start} 1 --nproc-per-node 1 -m penstock train run.toml  # rtx-3090",
    ]
    written = (folder / "run.toml").read_text()
    assert "# Devices of the pipeline's ranks: rtx-4090, rtx-3090." in written
    assert tomllib.loads(written)["schedule"]["split"] == [5, 3]
    assert "on the fullest device (rtx-4090, rank 0): fits" in text
    table = text[text.index("rank  device") :].splitlines()
    assert [line.split()[:2] for line in table[:3]] == [
        ["rank", "device"],
        ["0", "rtx-4090"],
        ["1", "rtx-3090"],
    ]
    page = (folder / "plan.html").read_text()
    assert "rtx-4090, 1 x 1 devices of 24 GB; rtx-3090, 1 x 1 devices of 24 GB" in page
    assert "<td>rtx-3090</td>" in page.replace(" ", "").replace("\n", "")


def test_unlike_devices_of_one_machine_start_together_in_the_order_that_a_search_chose(folder: Path):
    groups = [f'[[group]]\ndevice = "{name}"\nranks_per_node = 1\n' for name in ("rtx-4090", "rtx-3090")]
    (folder / "two.toml").write_text("\n".join(groups) + "[between]\nsame_host = true\n")
    words = ("gpt2", "-s", "64", "-b", "8", "-c", "two.toml", "--fix", "pp=2", "--schedule", "1f1b")
    text = planned(*words)
    plan = json.loads(planned(*words, "--json"))["plans"][0]
    first, second = plan["devices"]
    assert plan["cluster"] == f"{first}*1+{second}*1"
    assert plan["capacities"] == [21.6e9, 21.6e9]
    assert f"on {first}*1, then {second}*1\n" in text
    assert f"CUDA_VISIBLE_DEVICES must list the devices in this order: 1 x {first}, 1 x {second};" in text
    assert "torchrun --nproc-per-node 2 -m penstock train run.toml" in text
    assert "\ndevices " in text


def test_many_nodes_of_groups_are_started_from_the_first_and_the_last_of_each():
    lines, _ = started("pp=8,dp=2", "h100*2x5+a100-80gb*2x3")
    assert [line.split()[6:9:2] + line.split()[-1:] for line in lines[1:-1]] == [
        ["0", "2", "h100"], ["4", "2", "h100"], ["5", "2", "a100-80gb"], ["7", "2", "a100-80gb"],
    ]  # fmt: skip
    assert lines[-1].startswith("... and so on: 4 more nodes")


def test_a_run_on_unlike_devices_does_not_correct_their_rates(folder: Path):
    (folder / "run").mkdir()
    refused = str(invoke(*UNLIKE, "--from-run", "run").exception)
    assert "--from-run corrects the rates of alike devices, got rtx-4090*1+rtx-3090*1" in refused
    (folder / "mine.toml").write_text((folder / "cluster.toml").read_text())
    refused = str(invoke("gpt2", "-c", "rtx-4090*1+mine.toml*1", "--html", "mine.toml").exception)
    assert "mine.toml, which this command reads" in refused
