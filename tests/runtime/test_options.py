from __future__ import annotations

import inspect

import pytest

from penstock.base.errors import ConfigError
from penstock.runtime.options import ExecutionOptions, ParallelOptions
from penstock.runtime.pipeline import Pipeline


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": "all"}, "compile must be 'none', 'block' or 'stage', got 'all'"),
        ({"first_timeout": -1.0}, "first_timeout must be a positive number of seconds"),
        ({"memory": 0}, "memory must be a positive number of bytes or None, got 0"),
        ({"memory": True}, "memory must be a positive number of bytes or None, got True"),
    ],
)
def test_execution_options_are_checked_where_they_are_made(options, words):
    with pytest.raises(ConfigError, match=words):
        ExecutionOptions(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes must be a positive number of bytes, got 0"),
        ({"bucket_bytes": "all"}, "bucket_bytes must be a positive number of bytes, got 'all'"),
        ({"buffers": "last"}, "buffers must be"),
        ({"check_replicas": True}, "check_replicas must be a number of steps, or 0 for never, got True"),
        ({"check_replicas": -1}, "check_replicas must be a number of steps, or 0 for never, got -1"),
    ],
)
def test_parallel_options_are_checked_where_they_are_made(options, words):
    with pytest.raises(ConfigError, match=words):
        ParallelOptions(**options)


def test_a_pipeline_has_no_more_arguments_than_one_can_read():
    arguments = inspect.signature(Pipeline).parameters.values()
    assert len([a for a in arguments if a.kind is a.KEYWORD_ONLY]) <= 14
