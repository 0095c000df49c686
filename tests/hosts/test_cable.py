"""The network between the hosts of tests: a link's delay, rate and loss, and what a cut one does."""

from __future__ import annotations

import random

import pytest

from tests.support.hosts.cable import QUEUE, Link


def test_a_frame_takes_the_delay_and_its_size_over_the_rate_behind_those_before_it():
    link = Link(delay=0.01, rate=1e6)
    assert [link.due(5.0, 1000) for _ in range(3)] == pytest.approx([5.011, 5.012, 5.013])
    assert link.due(6.0, 1000) == pytest.approx(6.011)


def test_a_link_drops_what_its_queue_does_not_hold():
    link = Link(rate=1e6)
    taken = [link.due(0.0, 10_000) for _ in range(100)]
    arrived = [due for due in taken if due is not None]
    assert arrived == pytest.approx([0.01 * n for n in range(1, len(arrived) + 1)])
    assert QUEUE <= arrived[-1] <= QUEUE + 0.011


def test_jitter_and_loss_are_drawn_for_each_frame():
    random.seed(0)
    link = Link(delay=0.1, jitter=0.1, loss=0.25)
    taken = [link.due(0.0, 100) for _ in range(2000)]
    arrived = [due for due in taken if due is not None]
    assert 1400 < len(arrived) < 1600
    assert min(arrived) >= 0.1
    assert max(arrived) <= 0.2
    assert max(arrived) - min(arrived) > 0.09


def test_nothing_passes_a_cut_link():
    assert Link(cut=True).due(0.0, 100) is None
