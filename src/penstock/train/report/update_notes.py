"""First lines of a run about its updates, where they are not those of the defaults."""

from __future__ import annotations

from penstock.train.config.config import Config
from penstock.train.config.optim_defaults import fine_tuning_note
from penstock.train.data.run_data import RunData

_PRECISION = {
    "bf16": "fp32 weights, bf16 autocast",
    "bf16-weights": "bf16 weights; fp32 gradients and main weights",
    "fp16": "fp32 weights, fp16 autocast and a scaled loss",
}


def update_notes(config: Config, data: RunData) -> list[str]:
    """Return sentences about the precision, the samples of a step and the optimizer; none for the defaults."""
    train, runtime, optim = config.train, config.runtime, config.optim
    notes = []
    samples = train.batch * train.accumulate
    if train.accumulate > 1:
        notes.append(f"{train.accumulate} batches of {train.batch} samples per step, {samples} in all")
    if train.epochs:
        notes.append(f"{train.epochs:g} epochs of {data.per_epoch:,} samples are {train.steps:,} steps")
    if runtime.precision in _PRECISION:
        notes.append(f"precision {runtime.precision} ({_PRECISION[runtime.precision]})")
    if runtime.recompute != "none":
        notes.append(f"recompute {runtime.recompute}")
    if runtime.compile != "none":
        notes.append(f"each {runtime.compile} compiled")
    if not config.model.path and optim.name != "AdamW":
        arguments = "".join(f", {key} {value}" for key, value in optim.arguments.items())
        notes.append(f"{optim.name} with weight decay {optim.weight_decay:g}{arguments}")
    lines = ["; ".join(notes)] if notes else []
    return [*lines, fine_tuning_note(optim)] if config.model.path else lines
