"""Plans that recompute modules of blocks: their stages, what is refused, the search, and the run that is written."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from penstock.base.errors import ConfigError
from penstock.cli.plan import command
from penstock.plan.cluster import Cluster, Device, LinkSpeed, read_cluster
from penstock.plan.explore.branch_and_bound import distinct, search
from penstock.plan.explore.search_space import not_compared
from penstock.plan.prediction import predict
from penstock.plan.run_layout import Layout
from penstock.plan.stage_costs import layer_times, stage_costs
from penstock.profile.model_profile import of_shape, with_lora
from penstock.profile.model_shape import ModelShape
from penstock.schedule.placement import Placement
from penstock.train.config.file import load
from tests.support import planning
from tests.support.planning import round_cluster, timed_profile
from tests.support.small_spaces import SmallSpace, every_plan

# Two ranks have the same number of blocks.
DEEPSEEK, MIXTRAL = replace(planning.DEEPSEEK, layers=4), replace(planning.MIXTRAL, layers=4, experts=4)
DENSE = replace(MIXTRAL.dense, name="dense")


def test_stages_drop_and_repeat_what_each_of_their_blocks_has():
    at = Layout(pp=2, recompute="mlp+moe_act")
    cluster, each = read_cluster("h100*2"), 2 * 32
    plain, less = (
        stage_costs(layer_times(of_shape(DEEPSEEK), cluster, one, 32), one, Placement.loop(2, 1))
        for one in (at.with_values(recompute="none"), at)
    )
    # The first block has a feed-forward of 160, the three others two experts of 48 a token.
    assert (plain.saved - less.saved).tolist() == [(3 * 160 + 2 * 48) * each, 2 * 2 * 48 * each]
    # A block's activations are back in memory during its backward.
    assert less.transient.tolist() == [3 * 160 * each, max(2 * 48 * each, plain.transient[1])]
    assert less.repeated_flops.tolist() == [2 * 32 * 3 * 64 * 160, 0]
    assert (less.again > 0).all()
    assert (less.forward == plain.forward).all()
    # No layer runs a segment of its own.
    assert less.segments.tolist() == plain.segments.tolist()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2", "zb-v"])
def test_what_is_recomputed_costs_no_memory(schedule: str):
    # With a split backward, too, whose first half may leave more than the forward saved.
    for shape in (DEEPSEEK, MIXTRAL):
        whole = "mlp+moe" if shape.dense_layers else "moe"
        plans = [
            predict(
                of_shape(shape), read_cluster("h100*2"), Layout(pp=2, schedule=schedule, recompute=recompute),
                sequence=512, batch=8,
            )
            for recompute in ("none", "moe_act", whole, f"layernorm+{whole}", "full")
        ]  # fmt: skip
        peaks = np.array([[rank.total for rank in plan.memory] for plan in plans])
        assert (np.diff(peaks, axis=0) <= 0).all(), peaks.tolist()
        assert (peaks[-1] < peaks[0]).all()


def test_modules_without_the_sign_between_them_and_those_that_no_block_has_are_told():
    for name in ("moe_act", "layernorm"):
        with pytest.raises(ConfigError, match=rf"no key '{name}': modules of recompute are joined by \+"):
            Layout.parse(f"pp=2,recompute=mlp,{name}")
    alone = replace(DEEPSEEK, name="alone", dense_layers=4)
    with pytest.raises(
        ConfigError, match="recompute=moe: alone has no experts; its modules are layernorm, mla"
    ):
        predict(of_shape(alone), read_cluster("h100*2"), Layout(pp=2, recompute="moe"), sequence=32, batch=2)


@pytest.mark.parametrize(
    ("profile", "recompute", "message"),
    [
        (of_shape(DENSE), "moe_act", "recompute=moe_act: dense has no experts; its modules are layernorm, core_attn, mlp"),
        (of_shape(DENSE), "mlp+mla_up_proj", "recompute=mla_up_proj: dense has no latent attention"),
        (of_shape(MIXTRAL), "mlp", "recompute=mlp: mixtral has no blocks without experts"),
        (of_shape(MIXTRAL), "shared_experts", "recompute=shared_experts: mixtral has no shared experts"),
        (with_lora(of_shape(DENSE), 4), "layernorm", "recompute=layernorm: modules of dense with adapters are not costed"),
        (timed_profile(), "layernorm", "recompute=layernorm: the profile of timed is of whole layers"),
    ],
)  # fmt: skip
def test_a_module_that_a_model_lacks_is_refused_by_name(profile, recompute: str, message: str):
    cluster = round_cluster(ranks_per_node=1)
    for ask in (predict, lambda *given, **sizes: search(given[0], given[1], fixed=given[2], **sizes).best):
        with pytest.raises(ConfigError, match=message):
            ask(profile, cluster, {"recompute": recompute}, sequence=32, batch=2)


def small(shape: ModelShape, memory: float, **fixed: object) -> SmallSpace:
    device = Device(memory=memory, reserve=0.0, matmul={"bf16": 1e11}, memory_bandwidth=5e9, matmul_width=64)
    cluster = Cluster(
        name="small", device=device, ranks_per_node=2, nodes=1, node=LinkSpeed(1e-6, 1e9), step_overhead=1e-4
    )
    return SmallSpace(of_shape(shape), cluster, 64, 8, {"schedule": "1f1b", **fixed})


@pytest.mark.parametrize("shape", [DEEPSEEK, MIXTRAL], ids=["deepseek", "mixtral"])
def test_the_search_recomputes_modules_where_that_is_the_quickest_that_fits(shape: ModelShape):
    together = "layernorm+mla_up_proj+moe_act" if shape.kv_rank else "layernorm+moe_act"
    given = {"pp": 2, "microbatch": 2}
    roomy = {plan.layout.recompute: plan for plan in every_plan(small(shape, 1e9, **given))}
    assert {*roomy} == {"none", 2, "full", together}
    assert roomy["none"].peak_bytes > roomy[together].peak_bytes
    assert roomy["none"].step_seconds < roomy[together].step_seconds < roomy["full"].step_seconds
    tight = small(shape, roomy[together].peak_bytes, **given)
    result = search(
        tight.profile, tight.cluster, sequence=tight.sequence, batch=tight.batch, fixed=tight.fixed
    )
    (best, *_) = distinct(plan for plan in every_plan(tight) if plan.fits)
    assert result.best.layout.recompute == best.layout.recompute == together
    assert result.best.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
    assert "does not fit" in result.rejections["recompute"]["none"].text
    assert "recompute=3 and more, and of other modules" in result.not_compared
    given = Layout.parse(str(result.best.layout))
    assert (
        predict(tight.profile, tight.cluster, given, sequence=64, batch=8).step_seconds
        == result.best.step_seconds
    )


def test_the_space_of_other_models_has_no_modules():
    for space in (
        small(DENSE, 1e9).space,
        replace(small(DENSE, 1e9).space, profile=with_lora(of_shape(DENSE), 4)),
    ):
        assert {point.layout.recompute for point in space.points()} == {"none", 2, "full"}
        assert "recompute=3 and more" in not_compared(space)
    unfused = small(MIXTRAL, 1e9, attention="unfused").space
    assert {point.layout.recompute for point in unfused.points()} == {
        "none", "selective", 2, "full", "layernorm+core_attn+moe_act",
    }  # fmt: skip


def test_the_run_of_a_plan_recomputes_whole_blocks_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text("[model]\nlayers = 4\nexperts = 4\nexperts_per_token = 2\n")
    words = ["own.toml", "-c", "h100*2", "-b", "8", "-s", "16", "--out", "run.toml", "--layout"]
    outcome = CliRunner().invoke(
        command, [*words, "pp=2,recompute=moe_act layernorm"], catch_exceptions=False
    )
    assert (
        "recompute=layernorm+moe_act: the run recomputes whole blocks, so its step and memory"
        in outcome.output
    )
    text = Path("run.toml").read_text()
    assert tomllib.loads(text)["runtime"]["recompute"] == load(Path("run.toml")).runtime.recompute == "full"
    assert ",recompute=layernorm+moe_act\n" in text
    assert "# recompute=layernorm+moe_act: the run recomputes whole blocks" in text
