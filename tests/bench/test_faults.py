"""The quick part of the fault table, with real runs; ``python -m bench.faults`` is all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.faults.__main__ import ROWS

from tests.support.lanes import exhaustive, slow

ROW = {row.number: row for row in ROWS}


# Row 3 is run by `test_commands`; what ends the processes of rows 10, 11 and 14 is tested in `train`, too. Rows 6, 7, 8
# and 12 have their tests beside the checkpoints, without the trainer around them, and row 13 in `test_fuzz`; rows 1, 2 and
# 4 have limits of time that only a machine without other work keeps.
@pytest.mark.parametrize(
    "row",
    [*slow(ROW[5], ROW[9]), *exhaustive(ROW[10], ROW[11], ROW[14])],
    ids=lambda row: str(row.number),
)
def test_the_fault_does_no_harm(row, tmp_path: Path):
    assert row.run(tmp_path, True).failures == []
