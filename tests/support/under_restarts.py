"""What `test_restarts` starts with torchrun: steps until a file is there, then two more and out.

Arguments: the file; a named pipe; and what rank 1 does after its first step until the file is there: "step", or "fail".
Rank 0 then makes the file, and only waits to be ended.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import penstock
from penstock.base.errors import PenstockError
from tests.support import plain

torch.set_num_threads(1)
mark, turn, act = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
again = mark.exists()
count = os.environ["TORCHELASTIC_RESTART_COUNT"]


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write, so that the processes' lines do not mix


try:
    with penstock.Pipeline(plain.model(4), nn.functional.mse_loss, microbatches=4, timeout=300) as pipe:
        pipe.step(*plain.batch(0, 8))
        if not again:
            say(f"rank {pipe.rank} has stepped")
            if act == "fail" and pipe.rank == 0:
                mark.touch()
                turn.write_bytes(
                    b"yours"
                )  # this rank is out of its step, and of all that would tell it of the other's end
                signal.pause()
            if act == "fail":
                turn.read_bytes()
                os._exit(1)
            while True:
                pipe.step(*plain.batch(0, 8))
        say(f"again: rank {pipe.rank} of {pipe.ranks}, restart {count}")
        pipe.step(*plain.batch(1, 8))
except PenstockError as error:
    sys.exit(f"{type(error).__name__}: {error}")
