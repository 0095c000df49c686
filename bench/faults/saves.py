"""Rows 6, 7, 8 and 12: checkpoints that are truncated, damaged, too large for the disk, or resumed at another layout."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.faults.runs import Victim
from bench.faults.table import Checks, Outcome, Row
from penstock.base.errors import DataError
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.checkpoint.find import damage, path_of, read_manifest, steps_in
from penstock.checkpoint.read import Reader
from penstock.checkpoint.snapshot import Snapshot
from penstock.checkpoint.together import Together
from penstock.checkpoint.write import Facts, prune, write_checkpoint
from penstock.runtime.optim.optimizer import PipelineOptimizer
from penstock.runtime.pipeline import Pipeline
from penstock.train.config.sections import ModelConfig
from penstock.train.model.llama import layers, next_token_loss

TRIALS = 20


def save(folder: Path, step: int) -> None:
    """Write a checkpoint of two stages whose every number is the step's; delete the one before the last."""
    tensors = {s: {f"model/{s}.{n}": torch.full((1 << 16,), float(step)) for n in range(4)} for s in (0, 1)}
    values = {"model": {}, "optimizer": None, "extra": {}}
    snapshot = Snapshot(step, tensors, {0: ("0",), 1: ("1",)}, values)
    write_checkpoint(folder, snapshot, Facts(2, 0, {}, {}), Together(None, 1.0))
    prune(folder, 2, 0)


def kill_while_saving(root: Path) -> None:
    """Kill a child that saves without end at a random moment, `TRIALS` times; runs in a separate process."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    for step in range(1, 4):
        save(root / "measured", step)
    each = (time.perf_counter() - began) / 3
    chance = random.Random(5)
    for trial in range(TRIALS):
        folder = root / str(trial)
        save(folder, 1)
        child = os.fork()
        if child == 0:
            step = 1
            while True:
                step += 1
                save(folder, step)
        time.sleep(chance.random() * 3 * each)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def killed(root: Path, quick: bool) -> Outcome:
    """Row 6."""
    program = "import sys; from bench.faults import saves; saves.kill_while_saving(saves.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, str(root)], check=True, timeout=300, env=environment)
    checks, sound, halves = Checks(), 0, 0
    for trial in range(TRIALS):
        folder = root / str(trial)
        found = steps_in(folder)
        halves += len(list(folder.iterdir())) > len(found)
        good = bool(found)
        for step, path in found:
            manifest = read_manifest(path)
            good = good and manifest.step == step and not damage(path, manifest)
            with Reader(path, manifest) as reader:
                good = good and all(bool((reader.tensor(n) == step).all()) for n in manifest.tensors)
        sound += good
        checks.that(
            good, f"trial {trial}: {'nothing is there' if not found else 'a checkpoint is not sound'}"
        )
    return checks.outcome(
        f"{sound} of {TRIALS} load; {halves} kills left half a checkpoint, none under its name"
    )


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    """Remove the last byte."""
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": flip, "truncate": truncate, "delete": Path.unlink}


def damaged(root: Path, quick: bool) -> Outcome:
    """Row 7."""
    config = ModelConfig(vocabulary=32, width=16, layers=2, heads=4, kv_heads=2, hidden=32)
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(0))
    checks, refused = Checks(), 0
    with Pipeline(layers(config), next_token_loss, microbatches=2, ranks=2) as pipe:
        optimizer = PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-3)
        with Checkpoints(root, pipe, optimizer) as checkpoints:
            for _ in range(2):
                pipe.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
                optimizer.step()
                checkpoints.save()
        newest = path_of(root, 2)
        with Checkpoints(root, pipe, optimizer) as checkpoints:
            for path in sorted(newest.iterdir()):
                kept = path.read_bytes()
                for name, harm in DAMAGES.items():
                    harm(path)
                    refused += 1
                    try:
                        checkpoints.load(newest)
                        checks.that(False, f"{name} {path.name}: loaded")
                    except DataError as error:
                        checks.that(path.name in str(error), f"{name} {path.name}: not named in: {error}")
                    loaded = checkpoints.load_newest()
                    checks.that(
                        loaded is not None and loaded.step == 1, f"{name} {path.name}: not the one before"
                    )
                    path.write_bytes(kept)
            loaded = checkpoints.load_newest()
            checks.that(loaded is not None and loaded.step == 2, "made whole again, it is not used")
    return checks.outcome(f"{refused} of {refused} refused by name, the one before used")


def disk_full(root: Path, quick: bool) -> Outcome:
    """Row 8: from step 40 to step 100 no file may grow beyond 100 kB, so no checkpoint fits."""
    settings = {"train.steps": 160, "train.checkpoint_every": 10, "train.log_every": 100}
    victim = Victim(root=root, settings=settings).start()
    checks, saved = Checks(), victim.folder / "checkpoints"
    pid = victim.until("step", step=40)["pid"]
    before = steps_in(saved)
    room = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, room[1]))
    full = victim.events()[-1]["step"]
    victim.until("step", step=100)
    meanwhile = steps_in(saved)
    for _, path in meanwhile:
        checks.that(not damage(path, read_manifest(path)), f"{path.name} is damaged")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, room)
    ended = victim.wait()
    refused = (ended.out + ended.err).count("no checkpoint was written")
    checks.that(bool(before) and before[0] in meanwhile, "the checkpoint before is gone")
    # One that was begun while there was room may be finished.
    checks.that(all(step <= full for step, _ in meanwhile), "a checkpoint was written without room")
    checks.that(refused > 0, "nothing was said")
    checks.that(ended.code == 0, f"the run ended with {ended.code}: {ended.err[-500:]}")
    newest = steps_in(saved)[0][0]
    checks.that(newest == 160, f"with room again the newest is of step {newest}")
    return checks.outcome(
        f"{refused} saves refused with a line each, step {meanwhile[0][0]} intact; training went on and saved again"
    )


LAYOUTS: tuple[tuple[int, dict[str, object]], ...] = (
    (4, {"parallel.pp": 4}),
    (4, {"parallel.pp": 2, "parallel.dp": 2}),
    (2, {"parallel.pp": 1, "parallel.tp": 2}),
    (4, {"parallel.pp": 4, "parallel.virtual_stages": 2, "schedule.name": "interleaved-1f1b"}),
)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return weights and optimizer state of a checkpoint, by name; not the processes' own random generators."""
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        return {name: reader.tensor(name) for name in manifest.tensors if not name.startswith("generators/")}


def other_layouts(root: Path, quick: bool) -> Outcome:
    """Row 12: four steps at each of `LAYOUTS`, under torchrun."""
    checks = Checks()
    # A constant learning rate: the usual one depends on how many steps there will be.
    model = {"model.layers": 8, "train.checkpoint_every": 4, "optim.warmup": 0.0, "optim.final_lr": 1.0}
    plain = Victim(root=root / "plain", settings={**model, "parallel.pp": 1, "train.steps": 16}).run()
    losses: dict[int, float] = {}
    for number, (processes, layout) in enumerate(LAYOUTS):
        settings = {**model, **layout, "train.steps": 4 * number + 4}
        ended = Victim(
            root=root, processes=processes, settings=settings, resume=number > 0, echo=root / f"echo-{number}"
        ).run(240.0)
        checks.that(ended.code == 0, f"{layout} ended with {ended.code}: {ended.err[-500:]}")
        losses |= ended.losses()
        if number:
            before = tensors_of(path_of(ended.folder / "checkpoints", 4 * number))
            loaded = tensors_of(path_of(root / f"echo-{number}", 4 * number))
            same = before.keys() == loaded.keys() and all(
                torch.equal(v, loaded[k]) for k, v in before.items()
            )
            checks.that(same, f"loaded at {layout}, weights or optimizer state differ")
    expected = plain.losses()
    checks.that(losses.keys() == expected.keys(), f"steps {sorted(losses)} were done")
    far = max((abs(losses[step] - expected[step]) for step in losses.keys() & expected.keys()), default=1.0)
    checks.that(far <= 1e-5, f"the loss curve is off by {far:.1e}")
    return checks.outcome(f"state equal by name 3 of 3 times; losses within {far:.1e} of one process's")


ROWS = (
    Row(
        6,
        f"kill at {TRIALS} random points within a save",
        f"newest complete loads {TRIALS} of {TRIALS}",
        killed,
    ),
    Row(7, "flip one bit, truncate, delete: each file", "refused, file named, previous used", damaged),
    Row(8, "disk full during save (RLIMIT_FSIZE)", "previous intact, clear message", disk_full),
    Row(
        12,
        "go on at another layout: pp4, pp2 x dp2, tp2, pp4 v2",
        "state equal by name, losses to 1e-5",
        other_layouts,
    ),
)
