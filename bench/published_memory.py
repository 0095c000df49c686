"""Predicted bytes beside published ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bench.comparison import Row
from bench.fit import with_rates
from bench.published_runs import Run, runs
from penstock.plan.cluster import read_cluster
from penstock.plan.prediction import Prediction, predict
from penstock.plan.rank_memory import RankMemory
from penstock.plan.run_layout import Layout
from penstock.profile.closed_form import PARAMETER_BYTES, Workload
from penstock.profile.layer_cost import LayerCost
from penstock.schedule.memory import peak

GIB, GB = 2**30, 1e9
_FIGURE_1 = re.compile(
    r"params\+optimizer ([\d.]+) GiB, activations ([\d.]+) GiB .* / ([\d.]+) GiB \(selective"
)


def memory_rows(quick: bool) -> Iterator[Row]:
    """Yield Korthikanti's Figure 1, then each published peak once."""
    yield from _figure_1()
    seen = set()
    for run in runs():
        assert run.profile.shape is not None
        # The number of microbatches, and so the batch, does not change the peak.
        case = (run.group, run.key, run.layout, run.sequence, run.profile.shape.vocabulary, run.memory)
        if run.group in ("Zero Bubble", "Vocabulary", "SimuMax") and run.memory and case not in seen:
            seen.add(case)
            if not quick or len(seen) == 1:
                yield _peak_row(run)


def _figure_1() -> Iterator[Row]:
    """Yield the figure's rows: the blocks' bytes on one device."""
    for run in runs():
        if run.group != "Korthikanti" or run.layout.recompute != "full":
            continue
        figure = _FIGURE_1.search(run.notes)
        assert figure is not None
        static, unsaved, selective = map(float, figure.groups())
        whole = run.layout.with_values(recompute="none")
        less = run.layout.with_values(recompute="selective", sequence_parallel=True)
        of_blocks = run.key[0] // run.layout.pp * _block(run, whole).parameters * sum(PARAMETER_BYTES["bf16"])
        first = _predict(run, whole).memory[0]
        all_of_it = first.weights + first.gradients + first.optimizer
        yield _figure_row(run, "weights, gradients, optimizer", of_blocks, static, all_of_it)
        for says, layout, measured in (
            ("activations, kept", whole, unsaved),
            ("activations, selective recompute and sequence parallel", less, selective),
        ):
            prediction = _predict(run, layout)
            assert prediction.costs is not None
            assert prediction.program is not None
            blocks = int(peak(prediction.program.schedule, prediction.costs.counts)[0])
            cost = _block(run, layout)
            each = cost.saved_bytes if layout is whole else cost.selective_bytes
            yield _figure_row(run, says, blocks * each, measured, prediction.memory[0].activations)


def _figure_row(run: Run, says: str, predicted: float, measured: float, whole: float) -> Row:
    return Row(
        group=f"Korthikanti, {says.partition(',')[0]}",
        model=run.model,
        layout=says,
        unit="GiB",
        predicted=predicted / GIB,
        measured=measured,
        note=f"with embedding and head: {whole / GIB:.2f} on the first rank, {whole / predicted - 1:+.1%}",
    )


def _block(run: Run, layout: Layout) -> LayerCost:
    load = Workload(
        microbatch=layout.microbatch,
        sequence=run.sequence,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        dtype="bf16",
        attention="unfused",
    )
    return run.profile.table(load).costs[1]


def _predict(run: Run, layout: Layout) -> Prediction:
    cluster = with_rates(read_cluster(run.gpu), {}, run.gpus)
    return predict(run.profile, cluster, layout, sequence=run.sequence, batch=run.batch)


def _peak_row(run: Run) -> Row:
    halves = run.group in ("Zero Bubble", "Vocabulary")
    unit, size = ("GB", GB) if run.group == "Zero Bubble" else ("GiB", float(GIB))

    def allocated(rank: RankMemory) -> float:
        return rank.total - rank.margin - (rank.gradients / 2 if halves else 0)

    prediction = _predict(run, run.layout)
    most = max(map(allocated, prediction.memory))
    shape = run.profile.shape
    assert shape is not None
    layout = f"{run.layout.with_values(dtype=None)}, sequence {run.sequence}, vocabulary {shape.vocabulary}"
    return Row(
        group=f"{run.group}, peak",
        model=run.model,
        layout=layout,
        unit=unit,
        predicted=most / size,
        measured=run.memory or 0.0,
    )
