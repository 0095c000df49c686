"""Orders of Megatron-core's interleaved pipeline, and stages by its layout strings.

The table of microbatches and chunks is `get_schedule_table` of megatron/core/pipeline_parallel/schedules.py, its order is
`convert_schedule_table_to_order` of megatron/core/transformer/cuda_graphs.py, and a layout is a string for
``--pipeline-model-parallel-layout``, read by megatron/core/transformer/pipeline_parallel_layer_layout.py. All are those of
megatron-core 0.16.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from bench.conformance.orders import Cells, Order, Project, counts, order_of

Table = list[tuple[int, int]]
"""Microbatch and chunk of each forward of a rank."""

RANKS, MICROBATCHES, CHUNKS = (2, 3, 4), (4, 6, 8), (1, 2, 3)
LAYOUTS = (
    ("Et|tL", 2, 4), ("Ettt|tttL", 2, 4), ("E|t|t|L", 2, 4), ("Et|tt|tt|tL", 4, 8), ("Et*3|(tt|)*2,tL", 2, 6),
    ("E,t*2|(t|)*4,tt|t|L", 4, 8), ("Ett|(ttt|)*6,tL", 4, 4), ("(Et)*1|(tt|)*4,tL", 3, 6), ("E|(t|)*10,L", 4, 4),
    ("Et|t|t|t|m|L", 3, 3), ("Ettt|(tt|)*29,m|L", 16, 16), ("Et|(t|)*5,tm|L", 4, 8), ("Et|t||tL", 2, 4),
)  # fmt: skip
"""Layouts, ranks and microbatches; the last one has a stage without a layer."""


def projects(quick: bool) -> Iterator[Project]:
    """Yield the interleaved table for counts that Megatron takes, for those that it refuses, and the layouts."""
    installed = (
        importlib.util.find_spec("megatron") is not None
        and importlib.util.find_spec("megatron.core") is not None
    )
    source = "rules"
    if installed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core

        source = f"megatron-core {megatron.core.__version__}"
    order = their_order if installed else our_order
    for name, legal in (("Megatron-core table", True), ("Megatron-core table, counts it refuses", False)):
        orders = []
        for p, m, v in counts(RANKS, MICROBATCHES, CHUNKS, quick):
            for group in [p] if v == 1 else range(2, m + 1):
                fits = v == 1 or (group >= p and (m % group == 0 or m % group >= p))
                if fits == legal:
                    made = order_of(p, m, v, order(p, m, v, group), rules=our_order(p, m, v, group))
                    orders.append(made._replace(name=f"{made.name} group={group}"))
        yield Project(name, source, orders[-1:] if quick else orders)
    read = their_stages if installed else our_stages
    orders = [_of_layout(layout, p, m, read(layout), order) for layout, p, m in LAYOUTS]
    yield Project("Megatron-core layout strings", source, orders[:1] if quick else orders)


def our_order(p: int, m: int, v: int, group: int) -> Cells:
    """Return the order of every rank by the rules.

    Forwards go through the microbatches group by group, and through all chunks of a group before the next one begins;
    backwards do the same from the last chunk to the first. Before a forward and a backward take turns, a rank runs a forward
    for every rank after it; with several chunks, two for each, and a group of all chunks but one.
    """
    table: Table = []
    for first in range(0, m, group):
        table += [(j, chunk) for chunk in range(v) for j in range(first, min(first + group, m))]
    ranks = []
    for rank in range(p):
        ahead = p - 1 - rank if v == 1 else 2 * (p - 1 - rank) + (v - 1) * group
        ahead = min(ahead, len(table))
        signed = [chunk + 1 for _, chunk in table[:ahead]]
        for k in range(len(table)):
            if k + ahead < len(table):
                signed.append(table[k + ahead][1] + 1)
            signed.append(table[k][1] - v)
        ranks.append(_ops(rank, p, table, signed))
    return ranks


def their_order(p: int, m: int, v: int, group: int) -> Cells:
    """Return the order of every rank by Megatron's own functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
        from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order
    table = get_schedule_table(m, v, group)
    ranks = []
    for rank in range(p):
        # All that is asked of the communicator: sizes and the rank.
        place = SimpleNamespace(size=lambda: p, rank=lambda rank=rank: rank)
        asked = SimpleNamespace(pp_group=place, virtual_pipeline_model_parallel_size=None if v == 1 else v)
        _, _, ahead, _ = get_pp_rank_microbatches(m, v, group, p2p_communicator=asked)
        ranks.append(_ops(rank, p, table, convert_schedule_table_to_order(ahead, v, table)))
    return ranks


def _ops(rank: int, p: int, table: Table, signed: list[int]) -> list[str]:
    """Return the ops of a rank: chunk c is c + 1 for a forward and minus that for a backward, each in the table's order."""
    cells = []
    forwards = (j for j, _ in table)
    backwards = (j for j, _ in table)
    for number in signed:
        stage = (abs(number) - 1) * p + rank
        cells.append(f"{stage}F{next(forwards)}" if number > 0 else f"{stage}B{next(backwards)}")
    return cells


def our_stages(layout: str) -> list[str]:
    """Return the layers of every stage, a letter each: E embedding, t block, m block that predicts more tokens, L loss."""
    return _unrolled(layout).split("|")


def _unrolled(layout: str) -> str:
    """Return a layout without commas and repetitions: ``*n`` repeats the letter or the parentheses before it."""
    text = unit = ""
    for token in re.findall(r"\(.*?\)|\*\d+|[^,]", layout):
        if token.startswith("*"):
            text += unit * (int(token[1:]) - 1)
        else:
            unit = _unrolled(token[1:-1]) if token.startswith("(") else token
            text += unit
    return text


def their_stages(layout: str) -> list[str]:
    """Return the layers of every stage by Megatron's own parser."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    stages = PipelineParallelLayerLayout.parse_str_to_list(layout)
    return ["".join(letters[layer.name] for layer in stage) for stage in stages]


def _of_layout(
    layout: str, p: int, m: int, stages: list[str], order: Callable[[int, int, int, int], Cells]
) -> Order:
    """Return the order of a layout, with the layers of every stage."""
    assert stages == our_stages(layout), f"our own rules read {layout} in another way than the package"
    made = order_of(p, m, len(stages) // p, order(p, m, len(stages) // p, p))
    return made._replace(name=f"{layout} {made.name}", layers=[len(stage) for stage in stages])
