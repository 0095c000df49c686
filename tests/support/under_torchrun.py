"""What `test_pipeline` starts with torchrun: the lines of the README, no word of processes."""

import os

import torch
from torch import nn

import penstock
from tests.support import plain

torch.set_num_threads(1)
with penstock.Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4) as pipe:
    result = pipe.step(*plain.batch(0, 8))
    line = f"rank {pipe.rank} of {pipe.ranks}: {result.loss.item()!r}\n"
    os.write(1, line.encode())  # one write, so that the processes' lines do not mix
