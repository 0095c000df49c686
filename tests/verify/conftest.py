"""The recording of plain PyTorch with which the others are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.verify.loops import plain


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("recordings") / "plain"
    plain(folder)
    return folder
