"""A layout beside another, and what a training takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.base.errors import ConfigError
from penstock.plan.cluster import read_cluster
from penstock.plan.prediction import predict
from penstock.plan.side_by_side import Training, figures, messages_of, side_by_side
from penstock.profile.model_profile import of_shape
from penstock.show.units import size_text
from tests.support.planning import SEQUENCE, SMALL, round_cluster, timed_profile

H100 = read_cluster("h100*4")


def of_small(layout: str):
    return predict(of_shape(SMALL), H100, layout, sequence=SEQUENCE, batch=16)


@pytest.mark.parametrize(
    ("layout", "boundaries"),
    [("pp=1,dp=2", 0), ("pp=2", 1), ("pp=2,v=2,schedule=interleaved-1f1b", 3), ("pp=2,schedule=zb-v", 2)],
)
def test_messages_are_an_activation_and_a_gradient_for_each_boundary_between_ranks(
    layout: str, boundaries: int
):
    """The two middle stages of zb-v are on one rank."""
    found = messages_of(of_small(layout))
    assert found.number == boundaries * 2 * (8 if "dp=2" in layout else 16)
    # One sample's hidden states in 16 bits.
    assert found.size == found.number * SEQUENCE * SMALL.hidden * 2


def test_every_figure_has_a_name():
    plan = of_small("pp=4,recompute=full")
    rows = dict(figures(plan))
    assert list(rows) == ["layout", "step", "tokens/s", "fullest rank", "bubble", "messages", "devices"]
    assert (rows["layout"], rows["bubble"], rows["devices"]) == (str(plan.layout), f"{plan.bubble:.1%}", "4")
    tight = dict(figures(replace(plan, capacities=(1.0,) * len(plan.memory))))
    assert tight["fullest rank"].endswith(", does NOT fit in 1 B")


def test_bytes_of_hosts_stand_beside_each_other_if_either_layout_has_a_store():
    whole, stored = of_small("pp=2"), of_small("pp=1,v=2,schedule=breadth-first,store=disk,window=1")
    names = ["store, memory of a host", "store, disk of a host"]
    rows = {name: cells for name, *cells in side_by_side(whole, stored)}
    assert [name for name in rows if name not in dict(figures(whole))] == names
    parameters = float(stored.costs.parameters.sum())
    # Main weights of 4 bytes are in memory, and of 18 bytes the rest on the disk.
    assert stored.store_room == pytest.approx((4 * parameters, 14 * parameters))
    assert rows[names[0]] == ["0 B", size_text(4 * parameters)]
    assert rows[names[1]] == ["0 B", size_text(14 * parameters)]
    assert len(side_by_side(whole, whole)) == len(figures(whole))


def test_days_and_device_hours_of_a_training():
    plan = replace(of_small("pp=2"), tokens_per_second=1000.0, step_seconds=2.0, low=1.0, high=4.0)
    training = Training.of(plan, 86.4e6)
    assert training == (86.4e6, 1.0, 48.0)
    assert training.text(plan) == "86,400,000 tokens take 1 days (0.5 to 2) and 48 device hours on 2 devices."
    without = replace(plan, low=None, high=None)
    assert training.text(without) == "86,400,000 tokens take 1 days and 48 device hours on 2 devices."


def test_samples_without_tokens_have_no_training_over_tokens():
    plan = predict(timed_profile(4), round_cluster(), "pp=2", sequence=SEQUENCE, batch=8)
    with pytest.raises(ConfigError, match="--tokens needs a model whose samples have tokens"):
        Training.of(replace(plan, unit="samples"), 1e9)
