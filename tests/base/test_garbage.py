"""Garbage collection while modules are loaded, and of what is made afterwards."""

from __future__ import annotations

import gc
import weakref

from penstock.base.garbage import begin_loading, end_loading


def test_collections_are_rare_while_loading_and_usual_afterwards():
    end_loading()
    usual = gc.get_threshold()
    try:
        begin_loading()
        assert gc.get_threshold()[0] > 10 * usual[0]
    finally:
        end_loading()
    assert gc.get_threshold() == usual


class Node:
    other: Node


def test_what_was_loaded_is_not_looked_at_again_and_new_cycles_are_collected():
    loaded = [[] for _ in range(1000)]
    node = Node()
    end_loading()
    assert not any(thing is loaded[0] for thing in gc.get_objects())
    # It is freed once nothing refers to it.
    freed = weakref.ref(node)
    del node
    assert freed() is None
    cycle = Node()
    cycle.other = cycle
    freed = weakref.ref(cycle)
    del cycle
    gc.collect()
    assert freed() is None
