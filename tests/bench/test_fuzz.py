"""The quick part of the fuzzer: every kind of file that Penstock reads, spoiled some dozens of times."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from bench.faults.fuzz import fuzz
from bench.faults.samples import KINDS

pytestmark = pytest.mark.slow

COUNT = 40


@pytest.fixture(scope="module")
def outcomes():
    """All kinds at once, each in its own process."""
    with ThreadPoolExecutor(len(KINDS)) as pool:
        return dict(zip(KINDS, pool.map(lambda kind: fuzz(kind, range(COUNT), seed=7), KINDS), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_spoiled_files_are_refused_clearly_or_read(outcomes, kind):
    outcome = outcomes[kind]
    assert outcome.others == []
    assert outcome.cases == outcome.refused + outcome.read == COUNT
    assert outcome.refused > COUNT // 10


def test_offsets_beyond_the_memory_of_a_column_are_refused_before_its_values_are_read():
    """Of them pyarrow reads whatever is there, and may end the process."""
    outcome = fuzz("data", [97])
    assert (outcome.refused, outcome.others) == (1, [])
