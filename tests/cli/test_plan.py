"""``penstock plan``: its contract, its messages, and the run that its config starts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from penstock.base.errors import PenstockError
from penstock.cli.plan import command
from penstock.profile.model_profile import read_model
from penstock.schedule.check import check
from penstock.schedule.families import build_schedule
from penstock.schedule.text import read_csv, write_csv
from penstock.train.config.file import load
from tests.support.commands import python
from tests.support.lanes import exhaustive, slow
from tests.support.plan_inputs import GPT2, write_inputs
from tests.support.tiny_run import text_folder

MIXTURE = {
    "model_type": "olmoe", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256,
    "max_position_embeddings": 128,
}  # fmt: skip
OWN = """
model = {{width = 16, layers = 4, heads = 2, kv_heads = 1, hidden = 32}}
data = {{path = "{text}", sequence = 12}}
train = {{batch = 8}}
"""
PARTS = {
    "weights", "gradients", "optimizer", "activations", "recompute", "logits", "messages", "buckets", "margin",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path, gpt2=GPT2, mixture=MIXTURE)
    (tmp_path / "own.toml").write_text(OWN.format(text=tmp_path / "text"))
    return tmp_path


def invoke(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def plan(*words: str) -> dict[str, Any]:
    outcome = invoke(*words, "--json")
    assert outcome.exit_code == 0, outcome.exception
    return json.loads(outcome.stdout)


def message(*words: str) -> str:
    """Return the one line of a command that is refused."""
    outcome = invoke(*words)
    if isinstance(outcome.exception, PenstockError):  # `penstock.cli.main` prints it and exits with code 2
        text = str(outcome.exception)
    else:
        assert outcome.exit_code == 2, outcome.output
        text = outcome.stderr.splitlines()[-1].removeprefix("Error: ")
    assert "\n" not in text
    return text


def assert_is_prediction(prediction: dict[str, Any]) -> None:
    assert {
        "layout", "step_seconds", "low", "high", "tokens_per_second", "tflops_per_device", "hardware_tflops_per_device",
        "mfu", "memory", "fits", "bubble",
    } <= set(prediction)  # fmt: skip
    assert 0 < prediction["low"] <= prediction["step_seconds"] <= prediction["high"]
    assert 0 < prediction["tflops_per_device"] <= prediction["hardware_tflops_per_device"]
    assert 0 < prediction["mfu"] < 1 > prediction["bubble"] >= 0
    assert len(prediction["memory"]) == prediction["layout"]["pp"]
    for rank in prediction["memory"]:
        assert PARTS | {"total", "peak_op"} == set(rank)
        assert rank["total"] == sum(rank[part] for part in PARTS)
    assert prediction["fits"] == (max(r["total"] for r in prediction["memory"]) <= prediction["capacity"])


def test_a_layout_gives_one_prediction():
    layout = "pp=4,dp=2,tp=1,v=2,microbatch=1,schedule=interleaved-1f1b,recompute=full,shard=optimizer"
    words = ("gpt2", "--cluster", "a100-80gb*8", "--sequence", "64", "--batch", "32")
    result = plan(*words, "--layout", layout)
    assert_is_prediction(result)
    values = {
        "pp": 4, "dp": 2, "tp": 1, "v": 2, "schedule": "interleaved-1f1b", "recompute": "full", "shard": "optimizer",
        "window": None, "reduce_every": None,
    }  # fmt: skip
    assert values.items() <= result["layout"].items()
    assert result["tokens_per_second"] == pytest.approx(32 * 64 / result["step_seconds"])
    assert result["hardware_tflops_per_device"] > result["tflops_per_device"]


def test_a_search_gives_plans_the_best_first():
    result = plan("gpt2", "-c", "h100*4", "-s", "64", "-b", "16", "--top", "5")
    assert {"plans", "evaluated", "seconds"} <= set(result)
    assert len(result["plans"]) == 5
    for prediction in result["plans"]:
        assert_is_prediction(prediction)
        assert prediction["fits"]
    times = [prediction["step_seconds"] for prediction in result["plans"]]
    assert times == sorted(times)
    assert not Path("run.toml").exists()


def test_a_model_is_a_folder_a_config_a_toml_or_a_profile():
    words = ("-c", "h100*2", "-s", "64", "-b", "8", "--layout", "pp=2")
    read_model("gpt2").save("profile.json")
    same = [plan(name, *words)["step_seconds"] for name in ("gpt2", "gpt2/config.json", "profile.json")]
    assert len(set(same)) == 1
    assert_is_prediction(plan("own.toml", *words))


def test_own_schedules_are_predicted_and_searched():
    write_csv(build_schedule("zb-h1", 2, 8), Path("mine.csv"))
    words = ("gpt2", "-c", "h100*2", "-s", "64", "-b", "8")
    one = plan(*words, "--layout", "pp=2,schedule=mine.csv")
    searched = plan(*words, "--schedule", "mine.csv", "--fix", "pp=2")
    assert searched["plans"][0]["step_seconds"] <= one["step_seconds"]
    assert {p["layout"]["schedule"] for p in searched["plans"]} == {"mine.csv"}


def test_samples_default_to_those_that_the_model_allows(folder: Path):
    rotary = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 128,
        "vocab_size": 256, "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "llama.json").write_text(json.dumps(rotary))
    for name, tokens in (("gpt2", 64), ("llama.json", 512), ("own.toml", 12)):
        result = plan(name, "-c", "h100*2", "-b", "8", "--layout", "pp=2")
        assert result["tokens_per_second"] == pytest.approx(8 * tokens / result["step_seconds"])
    words = ("llama.json", "-c", "h100*2", "-b", "8", "--layout", "pp=2", "-s")
    assert plan(*words, "512")["assumptions"]
    refused = message(*words, "513")
    assert refused.startswith(
        "sequence must be at most 512, the positions of the model (max_position_embeddings"
    )
    assert "got 513; take sequence = 512" in refused


REFUSED = {
    "no such model": (["missing", "-c", "h100*2"], "cannot read the model"),
    "a family that is not split": (
        ["t5.json", "-c", "h100*2"], "This config cannot be traced: transformers has no causal language model of type 't5'",
    ),
    "a family that nobody knows": (
        ["other.json", "-c", "h100*2"],
        "see docs/planning.md. This config cannot be traced: other.json has model_type 'mine', which the installed",
    ),
    "a degree of a traced family": (["mixture", "-c", "h100*2", "--fix", "tp=2"], "traced with tp=1, got tp=2; take tp=1"),
    "more tokens than a traced family takes": (
        ["mixture", "-c", "h100*2", "-s", "129"], "sequence must be at most 128, the positions of the model",
    ),
    "a directory as cluster": (["gpt2", "-c", "gpt2"], "cannot read the cluster 'gpt2'"),
    "a key of the cluster": (["gpt2", "-c", "key.toml"], "no key device.memry (did you mean 'memory'?)"),
    "a negative rate": (["gpt2", "-c", "negative.toml"], "device.memory must be greater than 0, got -1"),
    "a rate of nothing": (["gpt2", "-c", "small.toml"], "device.matmul.bf16 must be 1e-30 to 1e+30"),
    "batch 0": (["gpt2", "-c", "h100*2", "-b", "0"], "--batch must be 1 to"),
    "a batch that nothing divides": (
        ["gpt2", "-c", "h100*3", "-b", "4", "--fix", "pp=1"],
        "a batch of 4 does not divide over 3 devices with pp=1; the nearest batch that does is 3 or 6",
    ),
    "nothing fits": (
        ["gpt2", "-c", "h100*2", "-b", "4", "--memory-limit", "1KB"],
        "no layout fits in memory; the smallest needs ",
    ),
    "more tokens than positions": (
        ["gpt2", "-c", "h100*2", "-s", "65", "--layout", "pp=2"], "sequence must be at most 64, the positions of the model",
    ),
    "an unknown key": (
        ["gpt2", "-c", "h100*2", "--layout", "schdule=1f1b"], "no key 'schdule' (did you mean 'schedule'?)",
    ),
    "the sequence as a key": (["gpt2", "-c", "h100*2", "--fix", "sequence=2"], "a sample are the option --sequence;"),
    "another tool's word": (["gpt2", "-c", "h100*2", "--fix", "tensor-parallel=2"], "(did you mean 'tp=2'?)"),
    "a value as a key": (["gpt2", "-c", "h100*2", "--layout", "pp=2,fp8"], "no key 'fp8' (did you mean 'dtype=fp8'?)"),
    "a contradiction": (
        ["gpt2", "-c", "h100*2", "-b", "8", "--layout", "pp=2,v=2,schedule=1f1b"], "virtual",
    ),
    "no schedule": (["gpt2", "-c", "h100*2", "--schedule", ""], "a search needs at least one schedule"),
    "a file of a schedule": (["gpt2", "-c", "h100*2", "--schedule", "no.csv"], "cannot read the schedule no.csv"),
    "seconds": (["gpt2", "-c", "h100*2", "--seconds", "nan"], "--seconds must be above 0"),
    "a memory limit": (["gpt2", "-c", "h100*2", "--memory-limit", "nan"], "--memory-limit must be bytes above 0"),
    "a search's option": (["gpt2", "-c", "h100*2", "--layout", "pp=2", "--fix", "pp=2"], "--layout predicts one layout"),
    "NUL": (["gp\0t2", "-c", "h100*2"], "null"),
    "a foreign run.toml": (["gpt2", "-c", "h100*2", "--out", "own.toml"], "was not written by penstock plan"),
    "no folder": (["gpt2", "-c", "h100*2", "--out", "no/run.toml"], "there is no folder no"),
}  # fmt: skip


TRACED = [name for name in REFUSED if "family" in name]
"""What is refused after transformers is imported."""


@pytest.mark.parametrize("case", [*(name for name in REFUSED if name not in TRACED), *slow(*TRACED)])
def test_bad_input_is_refused_in_one_line(folder: Path, case: str):
    (folder / "t5.json").write_text('{"model_type": "t5"}')
    (folder / "other.json").write_text('{"model_type": "mine"}')
    device = "[device]\nmemory = {}\nmatmul = {{bf16 = {}}}\nmemory_bandwidth = 1e9\n"
    (folder / "key.toml").write_text("[device]\nmemry = 1\n")
    (folder / "negative.toml").write_text(device.format(-1, 1e12))
    (folder / "small.toml").write_text(device.format(1e9, 1e-300))
    words, expected = REFUSED[case]
    assert expected in message(*words)
    assert not (folder / "run.toml").exists()


def test_its_own_file_is_written_again_and_one_of_others_stays(folder: Path):
    words = ("gpt2", "-c", "h100*2", "-s", "32", "-b", "4", "--fix", "pp=2")
    (folder / "run.toml").write_text("[train]\n")
    assert "run.toml exists and was not written by penstock plan" in message(*words)
    assert (folder / "run.toml").read_text() == "[train]\n"
    (folder / "run.toml").unlink()
    for _ in range(2):
        outcome = invoke(*words)
        assert outcome.exit_code == 0, outcome.output
    assert outcome.stdout.splitlines()[-3] == "written: run.toml"
    # Threads would run on the CPU.
    assert (
        outcome.stdout.splitlines()[-1] == "start:   torchrun --nproc-per-node 2 -m penstock train run.toml"
    )


def test_sharded_weights_are_in_the_run_and_on_the_page(folder: Path):
    """The config says what the plan says, and a plan of it again."""
    given = "[parallel]\nzero = true\nreduce_every = 2\n"
    (folder / "sharded.toml").write_text(f"[model]\nwidth = 64\nlayers = 8\n[data]\nsequence = 64\n{given}")
    layout = "pp=2,dp=2,v=2,schedule=interleaved-1f1b,shard=weights,window=1"
    words = ("sharded.toml", "-c", "h100*4", "-b", "16")
    outcome = invoke(*words, "--layout", layout, "--out", "run.toml", "--html", "page.html")
    assert outcome.exit_code == 0, outcome.output
    assert "assumed       Over 2 replicas, weights and gradients sharded: at most 2 red" in outcome.stdout
    parallel = tomllib.loads((folder / "run.toml").read_text())["parallel"]
    assert (parallel["shard"], parallel["window"]) == ("weights", 1)
    assert not {"zero", "reduce_every"} & set(parallel)
    loaded = load(folder / "run.toml").parallel
    assert (loaded.shard, loaded.window, loaded.reduce_every) == ("weights", 1, None)
    assert "weights, window 1" in (folder / "page.html").read_text()
    fixed = [word for value in layout.split(",") for word in ("--fix", value)]
    assert "weights, window 1" in invoke(*words, *fixed).stdout


ASKED = ("gpt2", "-c", "h100*4", "-s", "64", "-b", "16")


def test_the_answer_says_what_why_and_what_would_change_it():
    def reasons(lines: list[str]) -> list[str]:
        first = lines.index("Why not another:") + 1
        return lines[first : lines.index("", first)]

    lines = invoke(*ASKED).stdout.splitlines()
    assert lines[0].startswith("Use pp=")
    assert "Limited by " in lines[1]
    assert lines[3].split()[:3] == ["pp", "dp", "tp"]
    rows = lines[4:]
    assert len(set(rows[: rows.index("")])) == rows.index("")
    for heading in ("The best plan:", "Why not another:", "What would change it:"):
        assert heading in lines
    assert any(line.startswith("layout        pp=") for line in lines)
    left_out = next(line for line in lines if line.startswith("Not compared, "))
    assert "dtype=fp8;" in left_out
    assert "schedule=round-trip;" in left_out
    assert any(line.startswith("  half the bandwidth of the links: ") for line in lines)
    few, every = reasons(lines), reasons(invoke(*ASKED, "--why").stdout.splitlines())
    assert len(few) == 4 < len(every)
    assert few[3].strip() == f"(the nearest of {len(every)} reasons; --why prints all)"
    asked = invoke(*ASKED, "--fix", "dtype=fp8", "--schedule", "1f1b").stdout.splitlines()
    left_out = next(line for line in asked if line.startswith("Not compared, "))
    assert "dtype" not in left_out
    assert "schedules that --schedule leaves out" in left_out


@pytest.mark.slow
def test_a_family_without_closed_form_is_traced(folder: Path):
    words = ("-c", "h100*4", "-b", "8", "--layout", "pp=2,dp=2,shard=optimizer")
    of_config = plan("mixture", *words)
    assert_is_prediction(of_config)
    assert any("traced with tp=1" in sentence for sentence in of_config["assumptions"])
    assert of_config["tokens_per_second"] == pytest.approx(8 * 128 / of_config["step_seconds"])
    (folder / "wide.toml").write_text('[model]\npath = "mixture"\n[data]\nsequence = 64\n')
    outcome = invoke("wide.toml", "-c", "h100*2", "-b", "8")
    assert outcome.exit_code == 0, outcome.output
    assert "8 samples of 64 tokens" in outcome.stdout
    written = tomllib.loads((folder / "run.toml").read_text())
    assert written["model"] == {"path": str(folder / "mixture")}
    assert written["runtime"]["precision"] == "bf16-weights"


@pytest.mark.parametrize(
    "layout", ["pp=2,microbatch=1,schedule=zb-h1,recompute=full,split=1+3", "pp=2,microbatch=2"]
)
def test_the_config_is_one_that_train_reads(folder: Path, layout: str):
    assert invoke("own.toml", "-c", "cluster.toml", "--layout", layout, "--out", "run.toml").exit_code == 0
    config = load(folder / "run.toml")
    assert (config.parallel.pp, config.train.batch, config.data.sequence) == (2, 8, 12)
    if "zb-h1" in layout:
        assert (config.schedule.name, config.schedule.microbatches) == ("zb-h1", 8)
        assert (config.runtime.recompute, list(config.schedule.split)) == ("full", [1, 3])
    else:
        assert (config.schedule.name, config.schedule.microbatches) == ("1f1b", 4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["own.toml", *exhaustive("gpt2", "mixture")])
def test_the_planned_run_trains(folder: Path, model: str):
    text_folder(folder)  # of own.toml; the other trains on the default text
    words = [
        "plan",
        model,
        "-c",
        "cluster.toml",
        "-s",
        "12",
        "-b",
        "8",
        "--fix",
        "pp=2",
        "--fix",
        "recompute=full",
    ]
    more = [
        "train.steps=2",
        "train.eval_batches=1",
        "train.report=false",
        "sample.length=4",
        "train.name=planned",
    ]
    for arguments in (words, ["train", "run.toml", "--set", *more]):
        done = python(["-m", "penstock", *arguments], folder, seconds=500)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    assert "step 2/2  loss " in done.stdout
    planned = tomllib.loads((folder / "run.toml").read_text())
    ran = tomllib.loads((folder / "runs" / "planned" / "config.toml").read_text())
    for section, keys in (
        ("schedule", {"name", "microbatches", "split"}),
        ("parallel", {"pp"}),
        ("runtime", {"recompute"}),
    ):
        for key in keys & planned[section].keys():
            assert ran[section][key] == planned[section][key]


def test_the_best_plans_may_get_an_order_of_their_own(folder: Path):
    words = ("gpt2", "-c", "a100-80gb*8", "-s", "64", "-b", "24", "--fix", "pp=4", "--fix", "dp=2")
    plain = plan(*words)["plans"][0]
    ours = plan(*words, "--search-orders", "0.1")["plans"][0]
    assert_is_prediction(ours)
    assert ours["fits"]
    assert ours["step_seconds"] <= plain["step_seconds"]
    path = folder / "plan-order.csv"
    assert path.exists() == (ours["step_seconds"] < plain["step_seconds"])
    if path.exists():
        check(read_csv(path))
        assert ours["layout"]["schedule"] == str(path.absolute())  # so that a run may begin in any folder
    assert "belong to a search" in message(*words[:-4], "--layout", "pp=4", "--search-orders", "1")


def test_todays_layout_stands_beside_the_proposed_one():
    words = ("gpt2", "-c", "h100*4", "-s", "64", "-b", "16", "--top", "1", "--tokens", "2B")
    today = plan("gpt2", "-c", "h100*4", "-s", "64", "-b", "16", "--layout", "pp=4,schedule=gpipe")
    found = plan(*words, "--beside", "pp=4,schedule=gpipe")
    assert found["beside"] == today
    best = found["plans"][0]
    seconds = 2e9 / best["tokens_per_second"]
    assert found["training"]["days"] == pytest.approx(seconds / 86400)
    assert found["training"]["device_hours"] == pytest.approx(4 * seconds / 3600)
    text = invoke(*words, "--beside", "pp=4,schedule=gpipe", "--out", "plan.toml").stdout
    lines = [line.split() for line in text.splitlines()]
    assert ["today", "proposed"] in lines
    assert any(line[:1] == ["messages"] for line in lines)
    change = best["step_seconds"] / today["step_seconds"] - 1
    assert f"a step takes {-change:.1%} less time" in text
    assert "2,000,000,000 tokens take" in text
    words = ("gpt2", "-c", "a10*2", "-s", "64", "-b", "65536", "--top", "1")
    text = invoke(*words, "--beside", "pp=1,dp=2,microbatch=32768").stdout
    assert "today's does not fit, so times are not compared" in text


def test_samples_longer_than_the_configs_are_only_predicted():
    words = ("gpt2", "-c", "h100*2", "-s", "256", "-b", "4")
    assert "at most 64" in message(*words)
    outcome = invoke(*words, "--positions", "256")
    assert outcome.exit_code == 0, outcome.exception
    assert "There is no run.toml: the model's config allows samples of 64 tokens" in outcome.stdout
    assert not Path("run.toml").exists()
    assert "takes samples of up to 64 tokens already" in message(*words, "--positions", "32")


@pytest.mark.parametrize("text", ["0", "many", "-3B", "1e99"])
def test_tokens_are_a_number(text: str):
    words = ("gpt2", "-c", "h100*2", "-s", "64", "-b", "4")
    assert "--tokens must be a number from 1, such as 300B or 1.5e12" in message(*words, f"--tokens={text}")


def test_adapters_on_a_base_of_four_bits_are_only_predicted():
    words = ("gpt2", "-c", "rtx-4090*2", "-s", "64", "-b", "8", "--layout", "pp=2")
    whole, adapted = plan(*words), plan(*words, "--lora", "8", "--base-bits", "4")
    assert adapted["memory"][0]["weights"] < whole["memory"][0]["weights"]
    assert adapted["memory"][0]["optimizer"] < whole["memory"][0]["optimizer"]
    assert adapted["low"] is None
    outcome = invoke(*words[:-2], "--lora", "8")
    assert "There is no run.toml: penstock train has no adapters" in outcome.stdout
    assert "base_bits of the model must be 16, or 4 with adapters" in message(*words, "--base-bits", "4")


def test_a_plan_with_muon_trains_with_it():
    words = ("gpt2", "-c", "cluster.toml", "-s", "64", "-b", "8", "--fix", "optimizer=muon")
    outcome = invoke(*words)
    assert outcome.exit_code == 0, outcome.exception
    assert "a moment less of matrices that Muon updates" in outcome.stdout
    assert load(Path("run.toml")).optim.matrices == "Muon"
    assert "optimizer must be adamw or muon, got 'sgd'" in message(*words[:-1], "optimizer=sgd")
