"""``penstock plan --from-run``: the terms of a step, the corrected plan, and runs that are of something else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner, Result

from penstock.cli.plan import command
from penstock.cli.plan_run import _layout_of, config_of
from penstock.plan.cluster import read_cluster
from penstock.plan.prediction import predict
from penstock.profile.model_profile import read_model
from penstock.trace.events import Trace
from penstock.trace.folder import save_step
from tests.support.plan_inputs import CLUSTER as INPUT

MODEL = {"width": 16, "layers": 4, "heads": 2, "kv_heads": 1, "hidden": 32}
CONFIG = {
    "model": MODEL,
    "data": {"sequence": 16},
    "train": {"batch": 8},
    "schedule": {"name": "1f1b", "microbatches": 8},
    "parallel": {"pp": 2, "dp": 1, "tp": 1, "virtual_stages": 1, "zero": False, "sequence_parallel": False},
    "runtime": {"precision": "bf16"},
}
CLUSTER = INPUT.replace('dtype = "fp32"', "error = 0.5").replace(", fp16 = 2e10, fp32 = 2e10", "")
SLOWER = 1.75
AFTER = 0.01


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, a cluster, and a run whose ops and messages took `SLOWER` times as long as predicted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.toml").write_text(tomli_w.dumps({"model": MODEL}))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    write_config(tmp_path / "run", CONFIG)
    plan = predict(read_model("model.toml"), read_cluster("cluster.toml"), "pp=2", sequence=16, batch=8)
    assert plan.trace is not None
    for step, scale in ((1, 40.0), (2, SLOWER), (4, SLOWER), (6, SLOWER)):
        save_step(tmp_path / "run", step, as_measured(plan.trace, scale))
    step_seconds = SLOWER * plan.parts["pipeline"] + AFTER
    speeds = enumerate([1.0, 128 / step_seconds])
    rows = [{"kind": "train", "step": n, "tokens_per_second": speed} for n, speed in speeds]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def as_measured(trace: Trace, scale: float) -> Trace:
    info = {"source": "measured", "schedule": "1f1b"}
    return replace(trace, start=trace.start * scale, end=trace.end * scale, info=info)


def write_config(run: Path, config: dict[str, Any]) -> None:
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(tomli_w.dumps(config))


def invoke(*words: str) -> Result:
    return CliRunner().invoke(command, ["model.toml", "-c", "cluster.toml", "--from-run", "run", *words])


def test_terms_of_the_step_are_compared_and_correct_the_plan():
    outcome = invoke("--layout", "pp=2", "--json")
    assert outcome.exit_code == 0, outcome.exception
    plan = json.loads(outcome.stdout)
    ran = plan["from_run"]
    assert ran["step"] in (2, 4, 6)
    terms = {term["term"]: (term["predicted"], term["measured"]) for term in ran["terms"]}
    for term in ("forward", "backward", "message", "pipeline"):
        predicted, measured = terms[term]
        assert measured == pytest.approx(SLOWER * predicted, rel=1e-6)
    assert terms["reduction, optimizer, rest"][1] == pytest.approx(AFTER)
    assert terms["step"][1] == pytest.approx(terms["pipeline"][1] + AFTER)
    assert ran["inside"] == (ran["low"] <= terms["step"][1] <= ran["high"])
    # Sequence and batch are the run's, and the corrected cluster predicts its step.
    assert plan["step_seconds"] == pytest.approx(terms["step"][1], rel=1e-6)
    assert plan["tokens_per_second"] == pytest.approx(8 * 16 / plan["step_seconds"])


def test_what_a_run_shards_is_part_of_its_layout(folder: Path):
    for parallel, shard in (({"zero": True}, "optimizer"), ({"shard": "weights", "window": 1}, "weights")):
        write_config(folder / "run", {**CONFIG, "parallel": {**CONFIG["parallel"], **parallel}})
        layout, *_ = _layout_of(folder / "run", config_of(folder / "run"))
        assert (layout.shard, layout.window) == (shard, parallel.get("window"))


def test_the_comparison_is_printed(folder: Path):
    (folder / "cluster.toml").write_text(CLUSTER.replace("error = 0.5", "error = 0.99"))
    output = invoke("--layout", "pp=2").stdout
    assert "The measured step is outside the predicted interval of" in output
    (folder / "run" / "metrics.jsonl").unlink()
    assert "The measured step is" not in invoke("--layout", "pp=2").stdout


CHANGES = {
    "another model": ({"model": MODEL | {"layers": 8}}, "it has 8 blocks, and model has 4"),
    "another width": ({"model": MODEL | {"width": 32}}, "it has 32 values in a hidden state, and model has 16"),
    "another vocabulary": ({"model": MODEL | {"vocabulary": 512}}, "it has 512 tokens in its vocabulary, and model has"),
    "another dtype": ({"runtime": {}}, "run multiplied in fp32, and cluster has rates for bf16"),
    "no layout": ({"schedule": {}}, "cannot read the layout of the run from run/config.toml"),
    "a model that is gone": ({"model": {"config": "gone.json"}}, "gone.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_a_run_of_something_else_is_refused(folder: Path, case: str):
    change, message = CHANGES[case]
    write_config(folder / "run", CONFIG | change)
    assert message in str(invoke("--layout", "pp=2").exception)


def test_other_samples_and_no_config_are_refused(folder: Path):
    assert re.search(r"--sequence .* 16 tokens, got 32", str(invoke("-s", "32").exception))
    (folder / "run" / "config.toml").unlink()
    assert "cannot read the config of the run, run/config.toml" in str(invoke().exception)


@pytest.mark.slow
def test_a_run_of_a_family_without_closed_form(folder: Path):
    """It is compared in the dtype and with the samples of the run; a run of another size is refused."""
    config = {
        "model_type": "olmoe", "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "vocab_size": 64,
    }  # fmt: skip
    (folder / "moe.json").write_text(json.dumps(config))
    (folder / "wider.json").write_text(json.dumps({**config, "num_experts": 6}))
    write_config(folder / "run", {**CONFIG, "model": {"config": "moe.json"}})
    words = ["-c", "cluster.toml", "--from-run", "run", "--layout", "pp=2", "--json"]
    outcome = CliRunner().invoke(command, ["moe.json", *words])
    assert outcome.exit_code == 0, outcome.exception
    planned = json.loads(outcome.stdout)
    assert planned["tokens_per_second"] == pytest.approx(8 * 16 / planned["step_seconds"])
    refused = str(CliRunner().invoke(command, ["wider.json", *words]).exception)
    assert re.search(r"trained a different model from wider: it has [\d,]+ parameters", refused)


def test_a_finished_run_has_the_config_of_its_model(folder: Path):
    config = {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 4,
        "n_head": 2,
        "n_positions": 16,
        "vocab_size": 256,
    }
    (folder / "gpt2.json").write_text(json.dumps(config))
    (folder / "run" / "config.json").write_text(json.dumps(config))
    write_config(folder / "run", CONFIG | {"model": {"config": "gone.json"}})
    words = ["gpt2.json", "-c", "cluster.toml", "--from-run", "run", "--layout", "pp=2"]
    outcome = CliRunner().invoke(command, words)
    assert outcome.exit_code == 0, outcome.exception
