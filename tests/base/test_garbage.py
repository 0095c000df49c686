"""Garbage collection while modules are loaded, and of what is made afterwards."""

from __future__ import annotations

import gc
import weakref

from penstock.base.garbage import begin_loading, end_loading


class Node:
    def __init__(self) -> None:
        self.other: Node | None = None


def a_cycle() -> weakref.ref[Node]:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return weakref.ref(first)


def test_collections_are_rare_while_loading_and_usual_afterwards():
    end_loading()
    usual = gc.get_threshold()
    try:
        begin_loading()
        assert gc.get_threshold()[0] > 10 * usual[0]
    finally:
        end_loading()
    assert gc.get_threshold() == usual


def test_what_was_loaded_is_not_looked_at_again_and_new_cycles_are_collected():
    loaded = [[] for _ in range(1000)]
    end_loading()
    assert not any(thing is loaded[0] for thing in gc.get_objects())
    cycle = a_cycle()
    gc.collect()
    assert cycle() is None


def test_what_was_loaded_is_freed_once_nothing_refers_to_it():
    node = Node()
    end_loading()
    freed = weakref.ref(node)
    del node
    assert freed() is None
