"""The command ``penstock`` with a fault; it keeps a diary of its steps and of its end.

    python -m bench.faults.victim FOLDER FAULT train --set ...

FOLDER is the folder of the diaries; FAULT is the result of `Fault.dump`, or ``none``. Everything else is the unchanged
product: the fault wraps the methods that it strikes, in this process alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from bench.faults.fault import ECHO, Fault, Injector


def install(injector: Injector) -> None:
    """Wrap the methods that the fault may strike with the fault and with notes for the diary."""
    import torch

    from penstock.checkpoint.checkpoints import Checkpoints
    from penstock.parallel.replicas.bucket import Bucket
    from penstock.runtime.pipeline import Pipeline
    from penstock.stage.compute.stage import Stage
    from penstock.train import loop

    for name in ("forward", "forward_with_loss"):
        setattr(Stage, name, injector.around("F", getattr(Stage, name)))
    for name in ("backward", "backward_input"):
        setattr(Stage, name, injector.around("B", getattr(Stage, name)))
    Bucket.start = injector.before("reduction", Bucket.start)  # the fault
    optimizer: Any = torch.optim.AdamW
    optimizer.step = injector.before("optimizer", optimizer.step)
    step = Pipeline.step

    def noted(pipe: Pipeline, *args: Any, **named: Any) -> Any:
        injector.step = pipe.steps + 1
        result = step(pipe, *args, **named)
        injector.diary.write("step", step=pipe.steps, loss=float(result.loss or 0.0))
        return result

    Pipeline.step = noted  # notes
    checkpointer: Any = loop.RunCheckpointer
    resume = checkpointer.resume

    def echoed(self: Any) -> Any:
        standing = resume(self)
        echo = os.environ.get(ECHO)
        if standing.done and echo:
            with Checkpoints(echo, self._checkpoints.pipe, self._checkpoints.optimizer) as checkpoints:
                checkpoints.save()
                checkpoints.wait()
        return standing

    checkpointer.resume = echoed
    train = loop.train

    def watched(*args: Any, **named: Any) -> Any:
        try:
            found = train(*args, **named)
        except BaseException as error:
            injector.diary.write("end", error=type(error).__name__, message=str(error))
            raise
        injector.diary.write("end", error="", message="")
        return found

    loop.train = watched


def main() -> None:
    """Run the command."""
    folder, fault, *arguments = sys.argv[1:]
    injector = Injector(None if fault == "none" else Fault.read(fault), Path(folder))
    injector.diary.write("start")
    if injector.due("start"):
        injector.strike()
    install(injector)
    from penstock.cli import main as penstock

    sys.argv = ["penstock", *arguments]
    try:
        penstock()
    except SystemExit as leave:
        injector.diary.write("exit", code=leave.code)
        raise
    injector.diary.write("exit", code=0)


if __name__ == "__main__":
    main()
