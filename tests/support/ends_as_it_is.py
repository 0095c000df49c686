"""A script of one rank: trains a step in processes, and ends with the pipeline open or closed.

Prints how many threads of gloo there are once all that Python calls at exit has been called.

Arguments: ``open`` or ``closed``, and the axes of a mesh with their sizes, as ``pp=1 dp=2``.
"""

import atexit
import os
import sys
from pathlib import Path

import torch
from torch import nn

import penstock
from tests.support import plain


def print_threads_of_gloo() -> None:
    tasks = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
    print("threads of gloo:", sum("gloo" in task.read_text() for task in tasks), flush=True)


# Before a pipeline is made, and so called after what it registers.
atexit.register(print_threads_of_gloo)
torch.set_num_threads(1)
axes = {axis: int(size) for axis, size in (word.split("=") for word in sys.argv[2:])}
mesh = penstock.MeshShape(**{"pp": 1, "dp": 1, "tp": 1, **axes})
model = plain.model(4)
if mesh.tp > 1:
    model = nn.Sequential(*(nn.Sequential(part) for part in model))
pipe = penstock.Pipeline(model, nn.functional.mse_loss, microbatches=2, mesh=mesh, timeout=60)
pipe.step(*plain.batch(0, 8))
pipe.sum_over_ranks(torch.ones(1, dtype=torch.float64), replicas=True)
if sys.argv[1] == "closed":
    pipe.close()
