"""Values of a config that depend on how the command was started."""

from __future__ import annotations

import pytest

from penstock.base.errors import ConfigError
from penstock.train.config.config import Config, from_mapping
from penstock.train.config.resolve import resolve


def test_unset_ranks_are_two_threads_or_the_processes_there_are():
    assert resolve(Config(), None).parallel.pp == 2
    assert resolve(Config(), 5).parallel.pp == 5
    assert resolve(from_mapping({"model": {"layers": 1}}), None).parallel.pp == 1
    assert resolve(from_mapping({"parallel": {"pp": 3}}), None).parallel.pp == 3
    assert resolve(from_mapping({"parallel": {"pp": 3}}), 3).parallel.pp == 3


def test_ranks_that_are_not_the_processes_are_refused():
    with pytest.raises(ConfigError, match=r"parallel.pp is 3, but the launch has 2 processes"):
        resolve(from_mapping({"parallel": {"pp": 3}}), 2)


def test_unset_virtual_stages_are_the_familys():
    def virtual_stages(**schedule: str) -> int | None:
        return resolve(from_mapping({"schedule": schedule}), None).parallel.virtual_stages

    assert virtual_stages() == 1
    assert virtual_stages(name="interleaved-1f1b") == 2
    assert virtual_stages(name="mine.csv") == 1


def test_an_unset_prompt_suits_the_vocabulary():
    assert resolve(Config(), None).sample.prompt == "def "
    assert resolve(from_mapping({"model": {"vocabulary": 1000}}), None).sample.prompt == "0"
    assert resolve(from_mapping({"sample": {"prompt": ""}}), None).sample.prompt == ""
