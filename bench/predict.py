"""Predicted and measured steps on this machine: first every layout is predicted, then all are measured in turn.

For every model, transport and number of ranks the layers and the runtime are measured with as many ranks busy as will be:
layers alone (`measure_layers`), messages and overheads (`measure_cluster`), and short steps of four layouts (`calibrate`).
`penstock.plan.predict` then predicts each layout's step, without the optimizer, and the peak bytes of activations of
every rank. Only then are the layouts built and timed, some steps of each in turn. Of calibration steps the fastest
half counts, and of measured ones the first quarter, which is its middle: other work on the machine slows down the rest.
The choice is the layout of 8 microbatches with the least predicted time.

The machine may be faster or slower when the steps are measured than when they were predicted. So the error is printed a
second time, of each step over the reference of its group, which is a layout (1F1B) of the same round.

    python -m bench.predict [--rounds N] [--only MODEL] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from bench.calibration import calibrate
from bench.compare import Figures, main
from bench.memory import watch
from bench.predict_cases import ROWS, Case, alone, asleep, batch_of, cases, loss_of, model_of
from penstock.measure.busy_ranks import measure_cluster
from penstock.parallel.mesh import MeshShape
from penstock.plan.cluster import Cluster
from penstock.plan.prediction import Prediction, predict
from penstock.plan.rank_memory import held_activations
from penstock.plan.run_layout import Layout
from penstock.profile.measured import Effort, measure_layers
from penstock.profile.model_profile import Profile
from penstock.runtime.model.measured_split import blocks_by_cost
from penstock.runtime.options import ExecutionOptions
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.workers.pool import LocalProcesses

FASTEST = 0.5
"""Share of the calibration steps that counts."""
WARM_UP, IN_A_ROW = 2, 4
"""Steps of a pipeline in a row, which do not count and which do; then it closes, and the next layout's opens."""
MODELS = ("decoder", "gpt2", "conv")
EFFORT, QUICK_EFFORT = Effort(10.0, 40, 0.1), Effort(1.0, 5, 0.1)


class Result(NamedTuple):
    """Predicted and measured seconds of a step, and peak bytes of activations by rank (none if not measured).

    `relative` is the step over that of the group's reference, in the median over the rounds.
    """

    case: Case
    predicted: float
    measured: float
    relative: float
    predicted_relative: float
    low: float
    high: float
    predicted_bytes: tuple[int, ...] = ()
    measured_bytes: tuple[int, ...] = ()


def exchange(value: Any) -> list[Any]:
    """Return every process's value."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def profiled(model: str, mode: str, ranks: int, effort: Effort) -> tuple[Profile, Cluster]:
    """Measure a model's layers and this machine, with the ranks as threads or as processes."""
    x, y = batch_of(model, 1)
    processes = mode == "processes"
    profile = measure_layers(
        model_of(model, ranks), x, target=y, loss_fn=loss_of(model), microbatches=(ROWS[model],), name=model,
        ranks=1 if processes else ranks, effort=effort, exchange=exchange if processes else None,
    )  # fmt: skip
    cluster = measure_cluster(ranks, dp=2 if processes and ranks == 2 else 1)
    return calibrate(
        profile, cluster, partial(model_of, model, ranks), loss_of(model), x, y, rows=ROWS[model], ranks=ranks,
        check_finite=model != "sleep", steps=4 if effort == QUICK_EFFORT else 16, share=FASTEST,
    ), cluster  # fmt: skip


def split_of(case: Case, profile: Profile) -> tuple[int, ...] | str:
    """Return the blocks of every stage, or "even"."""
    return blocks_by_cost(profile, case.stages, ROWS[case.model]) if case.split == "measured" else "even"


def predicted(case: Case, profile: Profile, cluster: Cluster) -> Prediction:
    """Return the prediction of a layout."""
    rows = ROWS[case.model]
    virtual = case.stages // case.pp
    layout = Layout(
        pp=case.pp,
        dp=case.dp,
        tp=1,
        v=virtual,
        microbatch=rows,
        schedule=case.schedule,
        recompute=case.recompute,
        split=split_of(case, profile),
    )
    return predict(profile, cluster, layout, sequence=profile.sequence or 1, batch=case.batch * rows)


def bytes_of(prediction: Prediction) -> tuple[int, ...]:
    """Return the predicted peak bytes of activations of each rank, between ops."""
    costs, program = prediction.costs, prediction.program
    assert costs is not None
    assert program is not None
    schedule = program.schedule
    column = held_activations(schedule, costs)
    return tuple(int(column[schedule.rows(rank)].max()) for rank in range(schedule.ranks))


def built(case: Case, profile: Profile) -> Pipeline:
    """Return the pipeline of a layout."""
    split = split_of(case, profile)
    chooses = case.schedule in ("interleaved-1f1b", "breadth-first")
    return Pipeline(
        model_of(case.model, case.pp), loss_of(case.model), microbatches=case.microbatches, schedule=case.schedule,
        ranks=case.pp, virtual_stages=case.virtual if chooses else 1, split=split, recompute=case.recompute,
        mesh=MeshShape(pp=1, dp=case.dp) if case.dp > 1 else None,
        execution=ExecutionOptions(check_finite=case.model != "sleep"),
    )  # fmt: skip


def timed(pipe: Pipeline, case: Case) -> float:
    """Return the seconds of a step on the slowest rank."""
    x, y = batch_of(case.model, case.batch)
    pipe.zero_grad()
    if case.mode == "processes":
        dist.barrier()
    begin = perf_counter()
    pipe.step(x, y)
    seconds = perf_counter() - begin
    return max(exchange(seconds)) if case.mode == "processes" else seconds


def measured_peaks(pipe: Pipeline, case: Case) -> tuple[int, ...]:
    """Return the peak bytes of every rank between ops, in processes: in threads, one rank holds what another made."""
    peaks = [0] * case.pp
    pipe.wrap_ops(watch(peaks))
    pipe.step(*batch_of(case.model, case.batch))
    return tuple(map(max, zip(*exchange(peaks), strict=True))) if case.pp > 1 else tuple(peaks)


def compared(rank: int, group: Sequence[Case], rounds: int, effort: Effort, memory: bool) -> list[Result]:
    """Predict all layouts of a model on one transport, and then measure them in turn."""
    model, mode, ranks = group[0].model, group[0].mode, max(case.pp * case.dp for case in group)
    profile, cluster = profiled(model, mode, ranks, effort)
    predictions = [predicted(case, profile, cluster) for case in group]
    times: list[list[float]] = [[] for _ in group]
    measured_bytes: list[tuple[int, ...]] = [() for _ in group]
    for n in range(rounds):
        for number, case in enumerate(group):
            with built(case, profile) as pipe:
                times[number] += [timed(pipe, case) for _ in range(WARM_UP + IN_A_ROW)][WARM_UP:]
                if n == 0 and memory and case.dp == 1 and (case.pp == 1 or mode == "processes"):
                    measured_bytes[number] = measured_peaks(pipe, case)
    results = []
    reference = 1 if len(group) > 3 else 0
    base = predictions[reference]
    for case, p, found, peaks in zip(group, predictions, times, measured_bytes, strict=True):
        seconds = p.step_seconds - p.parts["optimizer"]
        relative = statistics.median(a / b for a, b in zip(found, times[reference], strict=True))
        predicted_relative = seconds / (base.step_seconds - base.parts["optimizer"])
        kept = bytes_of(p) if peaks else ()
        results.append(
            Result(
                case, seconds, first_quarter(found), relative, predicted_relative, p.low, p.high, kept, peaks
            )
        )
    return results


def first_quarter(found: Sequence[float]) -> float:
    """Return the quantile that is the middle of the fastest half, which is what calibration counts."""
    return sorted(found)[len(found) // 4]


def errors(results: Iterable[Result]) -> list[float]:
    """Return |predicted / measured - 1| of every layout, ascending."""
    return sorted(abs(r.predicted / r.measured - 1) for r in results)


def regrets(results: Sequence[Result]) -> list[float]:
    """Return how much slower the choice by prediction is than the best measured layout, for each model and transport."""
    found = []
    for key in dict.fromkeys((r.case.model, r.case.mode) for r in results):
        same = [
            r
            for r in results
            if (r.case.model, r.case.mode) == key and r.case.batch == 8 and r.case.pp * r.case.dp == 2
        ]
        if same:
            chosen = min(same, key=lambda r: r.predicted)
            found.append(chosen.measured / min(r.measured for r in same) - 1)
    return found


def summary(what: str, found: Sequence[float]) -> str:
    """Return a line with the median, nine of ten and the largest."""
    nine = found[min(len(found) - 1, int(0.9 * len(found)))]
    middle, most = statistics.median(found), found[-1]
    return f"{what}: {len(found)}; error {middle:.1%} in the median, {nine:.1%} for nine of ten, {most:.1%} at most"


def _groups(models: Sequence[str]) -> list[list[Case]]:
    """Return the layouts that are measured together."""
    computing, modes = [model for model in models if model != "sleep"], ("threads", "processes")
    groups = [alone(model) for model in computing]
    groups += [cases(model, mode) for model in computing for mode in modes]
    return groups + [asleep(ranks, mode) for ranks in (4, 8) for mode in modes if "sleep" in models]


def _quick_groups(models: Sequence[str]) -> list[list[Case]]:
    """Return the first layouts of a few groups."""
    conv = cases("conv", "processes")
    groups = [
        cases("decoder", "threads")[:2],
        [conv[0], conv[-1]],
        asleep(2, "processes")[:2],
    ]
    return [group for group in groups if group[0].model in models]


def measure(options: argparse.Namespace) -> Figures:
    """Predict and measure all groups of layouts."""
    torch.set_num_threads(1)
    effort = QUICK_EFFORT if options.quick else EFFORT
    models = (*MODELS, "sleep") if options.only is None else [options.only]
    groups = _quick_groups(models) if options.quick else _groups(models)
    results: list[Result] = []
    head = f"{'model':8}{'mode':10}{'pp':>3}{'dp':>3}  {'schedule':17}{'v':>2}{'m':>4}  {'split':9}{'keep':5}"
    yield f"{head}{'predicted':>12}{'measured':>11}  ratio"
    with LocalProcesses(8) as pool:
        for group in groups:
            ranks = max(case.pp * case.dp for case in group)
            job = (group, options.rounds, effort, group[0].model != "sleep")
            threads = group[0].mode == "threads"
            found = compared(0, *job) if threads else pool.run(ranks, compared, *job, timeout=1200)[0]
            for r in found:
                yield f"{r.case} {1e3 * r.predicted:9.2f} ms{1e3 * r.measured:8.2f} ms  {r.predicted / r.measured:.3f}"
            results += found
    computing = [r for r in results if r.case.model != "sleep"]
    sleeping = [r for r in results if r.case.model == "sleep"]
    figures: dict[str, Any] = {"rows": [{**r._asdict(), "case": str(r.case)} for r in results]}
    for what, part in (("computing layers", computing), ("sleeping layers", sleeping)):
        if part:
            figures[what] = errors(part)
            yield summary(what, figures[what])
            others = sorted(abs(r.predicted_relative / r.relative - 1) for r in part if r.relative != 1)
            figures[f"{what}, relative"] = others
            yield summary(f"{what}, relative to the group's reference", others)
    bytes_ = [a / b for r in computing for a, b in zip(r.predicted_bytes, r.measured_bytes, strict=True) if b]
    if bytes_:
        figures["bytes"] = bytes_
        yield summary("peak bytes", sorted(abs(ratio - 1) for ratio in bytes_))
    if found := regrets(computing):
        figures["regret"] = found
        yield f"choice against the best measured: {statistics.mean(found):.1%} slower in the mean, {max(found):.1%} at most"
    inside = sum(r.low <= r.measured <= r.high for r in results)
    yield f"inside the printed interval: {inside} of {len(results)}"
    total = [sum(getattr(r, key) for r in results) for key in ("predicted", "measured")]
    return {"ours": total[0], "peer": total[1], "ratio": total[0] / total[1], **figures}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the bench's own argument."""
    parser.add_argument("--only", choices=[*MODELS, "sleep"], help="measure one model only")


if __name__ == "__main__":
    main(measure, __doc__, rounds=6, add=add)
