"""A process killed at any moment of a save leaves the previous checkpoint or the new one, never half of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.faults import saves


@pytest.mark.slow
def test_killed_at_twenty_random_points_of_a_save_the_newest_loads_twenty_times(tmp_path: Path):
    assert saves.killed(tmp_path, True).failures == []
