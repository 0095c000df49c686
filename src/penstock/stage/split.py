"""Which layers make up which stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import SplitError, nearest
from penstock.stage.layers import Layer
from penstock.stage.partition import Ranges, by_counts, by_ranges, by_weights, even

Split = str | Sequence[int] | Sequence[tuple[int, int]] | Mapping[str, object]


def split_layers(layers: Sequence[Layer], stages: int, split: Split = "even") -> list[list[Layer]]:
    """Cut a model's layers into `stages` runs.

    Args:
        layers: the model, in order.
        stages: number of stages, ranks times virtual stages.
        split: one of

            - ``"even"``: equal numbers of blocks, the remainder to the earliest stages; embedding layers at the
              front ride along on the first stage, head layers at the end on the last;
            - ``{"layers_per_stage": n}``: n blocks a stage (the last takes what is left), or a list of counts,
              one a stage; embedding and head ride along as above;
            - a list of counts, one a stage: short for the same;
            - ``{"ranges": [(start, stop), ...]}``, or the list itself: over all layers, embedding and head included;
            - ``{"weights": [w, ...]}``: one weight a layer, over all layers; the contiguous split whose heaviest
              stage is lightest.

    Raises:
        SplitError: the split does not fit the model or the number of stages.
    """
    if isinstance(split, str):
        if split != "even":
            raise SplitError(f"no split {split!r}{nearest(split, ['even'])}; {_ALLOWED}")
        return _around(layers, stages, lambda blocks: even(blocks, stages))
    if isinstance(split, Mapping):
        if len(split) != 1 or (key := next(iter(split))) not in _KEYS:
            raise SplitError(f"cannot read the split {dict(split)!r}; {_ALLOWED}")
        value = split[key]
        if key == "weights":
            weights = [float(w) for w in _numbers(key, value)]
            if len(weights) != len(layers):
                raise SplitError(f"{len(weights)} weights for {len(layers)} layers; one a layer")
            return _cut(layers, stages, by_weights(weights, stages))
        if key == "layers_per_stage":
            if isinstance(value, int):
                return _around(layers, stages, lambda blocks: _fixed(blocks, stages, value))
            counts = [int(c) for c in _numbers(key, value)]
            return _around(layers, stages, lambda blocks: by_counts(counts, blocks))
        split = _pairs(value)
    items: list[object] = list(split)
    if items and all(isinstance(item, int) for item in items):
        counts = [int(c) for c in _numbers("split", items)]
        return _around(layers, stages, lambda blocks: by_counts(counts, blocks))
    return _cut(layers, stages, by_ranges(_pairs(items), len(layers)))


_KEYS = ("layers_per_stage", "ranges", "weights")
_ALLOWED = (
    "a split is 'even', a list of counts, a list of (start, stop) ranges, or one of "
    "{'layers_per_stage': n}, {'ranges': [...]}, {'weights': [...]}"
)


def _numbers(key: str, value: object) -> list[int | float]:
    if not isinstance(value, Sequence) or any(
        isinstance(v, bool) or not isinstance(v, int | float) for v in value
    ):
        raise SplitError(f"{key} must be a list of numbers, not {value!r}")
    return list(value)


def _pairs(value: object) -> list[tuple[int, int]]:
    pairs = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not pairs or any(
        not isinstance(p, Sequence) or len(p) != 2 or not all(isinstance(i, int) for i in p) for p in pairs
    ):
        raise SplitError(f"cannot read the split {value!r}; {_ALLOWED}")
    return [(p[0], p[1]) for p in pairs]


def _fixed(blocks: int, stages: int, each: int) -> Ranges:
    if each < 1:
        raise SplitError(f"layers_per_stage must be at least 1, not {each}")
    last = blocks - each * (stages - 1)
    if not 1 <= last <= each:
        raise SplitError(
            f"{blocks} blocks at {each} a stage make {-(-blocks // each)} stage(s), but there are {stages}"
        )
    return by_counts([each] * (stages - 1) + [last], blocks)


def _around(layers: Sequence[Layer], stages: int, place: object) -> list[list[Layer]]:
    """Place the blocks with `place`, then give the first stage what precedes them and the last what follows."""
    assert callable(place)
    roles = [layer.role for layer in layers]
    front = next((n for n, role in enumerate(roles) if role != "embedding"), len(roles))
    back = len(roles) - next((n for n, role in enumerate(reversed(roles)) if role != "head"), len(roles))
    inner = layers[front:back]
    if astray := [layer.name for layer in inner if layer.role != "block"]:
        raise SplitError(
            f"embedding layers come first and head layers last; {astray[0]!r} stands between blocks"
        )
    runs = [list(inner[start:stop]) for start, stop in place(len(inner))]
    if len(runs) != stages:
        raise SplitError(
            f"the split makes {len(runs)} stage(s), but there are {stages} (ranks times virtual stages)"
        )
    runs[0] = [*layers[:front], *runs[0]]
    runs[-1] = [*runs[-1], *layers[back:]]
    return runs


def _cut(layers: Sequence[Layer], stages: int, ranges: Ranges) -> list[list[Layer]]:
    if len(ranges) != stages:
        raise SplitError(
            f"the split makes {len(ranges)} stage(s), but there are {stages} (ranks times virtual stages)"
        )
    return [list(layers[start:stop]) for start, stop in ranges]
