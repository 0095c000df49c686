"""What `test_published_models` starts with torchrun: each form is trained, and compared with plain PyTorch."""

import os

import torch

from tests.support.published_models import FORMS, differences, piped, plainly

torch.set_num_threads(1)
for name in FORMS:
    line = f"rank {os.environ['RANK']}, {name}: {differences(piped(name), plainly(name))}\n"
    os.write(1, line.encode())  # one write, so that the processes' lines do not mix
