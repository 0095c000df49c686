from __future__ import annotations

import pytest

from penstock.counts import is_count, require_count
from penstock.errors import ConfigError


@pytest.mark.parametrize("value", [True, 0, -1, 1.0, "1", None])
def test_only_whole_numbers_of_at_least_one_are_counts(value: object):
    assert not is_count(value)
    with pytest.raises(ConfigError, match=r"^ranks must be a whole number of at least 1, got "):
        require_count("ranks", value)


def test_bounds_are_inclusive():
    assert is_count(1)
    assert is_count(0, least=0)
    assert is_count(8, most=8)
    assert not is_count(9, most=8)
    require_count("batch", 1_000_000, most=1_000_000)
    with pytest.raises(ConfigError, match="batch must be a whole number from 1 to 1,000,000, got 1000001"):
        require_count("batch", 1_000_001, most=1_000_000)
