"""The Python that ``penstock plan`` gives for a profile of layers: it runs, with the gradients of plain PyTorch."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import penstock
from penstock.cli.plan import command
from penstock.cli.plan_files import pipeline_code
from penstock.plan.cluster import read_cluster
from penstock.plan.prediction import predict
from penstock.profile.model_profile import of_shape
from penstock.runtime.workers.pool import LocalProcesses
from tests.support.lanes import slow
from tests.support.plan_inputs import write_inputs
from tests.support.planning import SMALL

LOSS = nn.functional.mse_loss
BATCH = 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), *[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, generator=draws), torch.randn(BATCH, 16, generator=draws)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    x, y = batch()
    penstock.profile_layers(model(), x, target=y, loss_fn=LOSS, measure=False).save("profile.json")
    return tmp_path


def planned(*words: str) -> str:
    outcome = CliRunner().invoke(command, ["profile.json", "-c", "cluster.toml", "-b", str(BATCH), *words])
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def printed(output: str) -> str:
    """Return the lines of Python in the output of a plan."""
    code, start = output.split("In your script:\n")[1].split("start:")
    assert start.split()[:3] == ["torchrun", "--nproc-per-node", "2"]
    return textwrap.dedent(code)


def gradients_of(code: str) -> tuple[dict[str, torch.Tensor], penstock.Pipeline]:
    """Run the lines and a step; return the gradients by name, those of the first replica."""
    names: dict[str, Any] = {"model": model(), "loss_fn": LOSS}
    exec(code, names)
    with names["pipe"] as pipe:
        pipe.step(*batch())
        return {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}, pipe


def plain_gradients(microbatches: int) -> dict[str, torch.Tensor]:
    plain = model()
    x, y = batch()
    for part_x, part_y in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        (LOSS(plain(part_x), part_y) / microbatches).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


INTERLEAVED = "pp=2,microbatch=2,schedule=interleaved-1f1b,v=2,split=1+2+2+1,recompute=2"


# A split given and one by cost, all recomputed and some; a search finds one of these.
@pytest.mark.parametrize(
    "words",
    [
        ("--layout", INTERLEAVED),
        ("--layout", "pp=2,microbatch=4,schedule=gpipe,split=cost"),
        *slow((("--fix", "pp=2"),), (("--layout", "pp=2,microbatch=1,schedule=zb-v,recompute=full"),)),
    ],
    ids=lambda words: words[1].replace(",", " "),
)
def test_the_printed_lines_make_a_pipeline_with_the_gradients_of_plain_pytorch(words: tuple[str, ...]):
    actual, pipe = gradients_of(printed(planned(*words)))
    assert pipe.ranks == 2
    expected = plain_gradients(pipe.microbatches)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert not Path("run.toml").exists()
    if INTERLEAVED in words:
        assert [len(pipe.stages[stage].module.layers) for stage in range(4)] == [1, 2, 2, 1]
        assert pipe.microbatches == 4


def run_lines(rank: int, code: str) -> torch.Tensor | None:
    torch.set_num_threads(1)
    names: dict[str, Any] = {"model": model(), "loss_fn": LOSS}
    exec(code, names)
    with names["pipe"] as pipe:
        loss = pipe.step(*batch()).loss
        names["optimizer"].step()
    return loss


ZERO = "pp=1,dp=2,microbatch=1,shard=optimizer"
STORED = "pp=2,v=2,microbatch=1,schedule=hanayo,store=disk,window=1"
SHARDED = "pp=1,dp=2,v=2,microbatch=1,schedule=hanayo,shard=weights,window=1"


def test_replicas_are_a_mesh_zero_an_optimizer_and_sharded_weights_options_of_the_pipeline():
    code = printed(planned("--layout", ZERO))
    assert "mesh=penstock.MeshShape(pp=1, dp=2),\n    microbatches=4," in code
    assert "optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, zero=True)" in code
    code = printed(planned("--layout", SHARDED))
    assert 'parallel=penstock.ParallelOptions(shard="weights", window=1),' in code
    code = printed(planned("--layout", STORED))
    assert 'parallel=penstock.ParallelOptions(store="disk", window=1),' in code


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ZERO, SHARDED])
def test_the_lines_for_replicas_run(layout: str, processes: LocalProcesses):
    for loss in processes.run(2, run_lines, printed(planned("--layout", layout))):
        torch.testing.assert_close(loss, LOSS(model()(batch()[0]), batch()[1]).detach())


def test_the_lines_are_written_to_a_file_on_demand(folder: Path):
    words = ("--fix", "pp=2", "--fix", "schedule=gpipe", "--out", "plan.py")
    output = planned(*words)
    assert "written: plan.py\nstart:   torchrun" in output
    actual, pipe = gradients_of((folder / "plan.py").read_text())
    assert all(torch.equal(actual[name], value) for name, value in plain_gradients(pipe.microbatches).items())
    planned(*words)  # its own file is written again
    refused = CliRunner().invoke(command, ["profile.json", "-c", "cluster.toml", "--out", "run.toml"])
    assert refused.exit_code == 2
    assert "give --out plan.py" in refused.stderr


def test_samples_without_tokens_are_counted_as_samples():
    result = json.loads(planned("--layout", "pp=2", "--json"))
    assert result["unit"] == "samples"
    assert result["tokens_per_second"] == pytest.approx(BATCH / result["step_seconds"])
    output = planned("--layout", "pp=2")
    assert "batch         8 samples\n" in output
    assert " samples/s; " in output


def test_autocast_of_a_profile_is_that_of_the_pipeline():
    x, y = batch()
    told = {"target": y, "loss_fn": LOSS, "measure": False}
    profile = penstock.profile_layers(model(), x, **told, autocast=torch.bfloat16)
    plan = predict(profile, read_cluster("h100*2"), "pp=2", batch=BATCH)
    assert "    autocast=torch.bfloat16,\n" in pipeline_code(profile, plan, BATCH)


def test_a_model_of_given_sizes_is_on_a_mesh_with_its_shards():
    profile = of_shape(SMALL)
    plan = predict(profile, read_cluster("h100*8"), "pp=2,dp=2,tp=2,sequence_parallel=true", batch=16)
    code = pipeline_code(profile, plan, 16)
    compile(code, "plan", "exec")
    assert "mesh=penstock.MeshShape(pp=2, dp=2, tp=2)" in code
    assert "sequence_parallel=True" in code
    assert "autocast=torch.bfloat16" in code
