"""Assignment of a model's layers to stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from penstock.base.errors import SplitError, nearest
from penstock.stage.layers import Layer, whole_name
from penstock.stage.partition import Ranges, by_counts, by_ranges, by_weights, even

Split = str | Sequence[int] | Sequence[tuple[int, int]] | Mapping[str, object]


def split_layers(layers: Sequence[Layer], stages: int, split: Split = "even") -> list[list[Layer]]:
    """Split a model's layers into contiguous ranges, one per stage.

    Args:
        layers: layers of the model, in order.
        stages: number of stages, ranks times virtual stages.
        split: split of the layers (default "even"), one of

            - ``"even"``: equal numbers of blocks, the remainder to the earliest stages; embedding layers at the
              front go to the first stage, head layers at the end to the last;
            - ``{"layers_per_stage": n}``: n blocks per stage (the last takes the rest), or a list of counts,
              one per stage; embedding and head as above;
            - a list of counts, one per stage: short for the same; the first may be 0 if there is an embedding, and the
              last if there is a head, which then is a stage of its own;
            - ``{"ranges": [(start, stop), ...]}``, or the list itself: over all layers, embedding and head included;
            - ``{"weights": [w, ...]}``: one weight a layer, over all layers; the contiguous split whose heaviest
              stage is lightest.

    Raises:
        SplitError: if the split does not fit the model or the number of stages.
    """
    if isinstance(split, str):
        if split != "even":
            raise SplitError(f"no split {split!r}{nearest(split, ['even'])}; {_ALLOWED}")
        return _split_blocks(layers, stages, lambda blocks: [b - a for a, b in even(blocks, stages)])
    if isinstance(split, Mapping):
        keys = list(split)
        if len(keys) != 1 or (key := keys[0]) not in _KEYS:
            near = "".join(nearest(str(key), [*_KEYS, "measured"]) for key in keys[:1])
            raise SplitError(f"a split must have one key, got {', '.join(map(repr, keys))}{near}; {_ALLOWED}")
        value = split[key]
        if key == "weights":
            weights = [float(w) for w in _numbers(key, value)]
            if len(weights) != len(layers):
                raise SplitError(f"{len(weights)} weights for {len(layers)} layers; one per layer")
            return _split_ranges(layers, stages, by_weights(weights, stages))
        if key == "layers_per_stage":
            if isinstance(value, int):
                return _split_blocks(layers, stages, lambda blocks: _fixed(blocks, stages, value))
            counts = [int(c) for c in _numbers(key, value)]
            return _split_blocks(layers, stages, counts)
        split = _pairs(value)
    if not isinstance(split, Sequence):
        raise SplitError(f"a split cannot be {split!r}; {_ALLOWED}")
    items: list[object] = list(split)
    if items and all(isinstance(item, int) for item in items):
        counts = [int(c) for c in _numbers("split", items)]
        return _split_blocks(layers, stages, counts)
    return _split_ranges(layers, stages, by_ranges(_pairs(items), len(layers)))


def warn_of_a_large_layer(layers: Sequence[Layer], costs: Sequence[float], what: str) -> None:
    """Warn if one layer has more than half of a model and its blocks could be layers, with what would divide it."""
    largest = max(range(len(layers)), key=lambda n: costs[n])
    layer, share = layers[largest], costs[largest] / (sum(costs) or 1.0)
    if share <= 0.5 or layer.module is None or (blocks := _blocks_within(layer.module)) is None:
        return
    name, count = blocks
    where = whole_name(layer.name, name) if name else layer.name
    warnings.warn(
        f"layer {layer.name!r} has {share:.0%} of the model's {what}, and one rank has a layer as a whole, so the other "
        f"ranks wait for it. Let the model's forward loop over the {count} blocks of {where}, or make each of them a "
        "layer, as docs/models.md shows under 'Layers by hand'",
        UserWarning,
        stacklevel=5,
    )


def parameter_counts(layers: Sequence[Layer]) -> list[float] | None:
    """Return the number of parameters that each layer has and no earlier one; None if some layers are built later."""
    seen: set[int] = set()
    counts: list[float] = []
    for layer in layers:
        if layer.module is None:
            return None
        new = {id(p): p.numel() for p in layer.module.parameters() if id(p) not in seen}
        seen |= new.keys()
        counts.append(sum(new.values()))
    return counts


def _blocks_within(module: nn.Module) -> tuple[str, int] | None:
    """Return name and length of the container with most of a module's parameters, in parts; None if none has them."""
    total = _size(module)
    for name, inner in module.named_modules():
        parts = [child for child in inner.children() if _size(child)]
        if isinstance(inner, nn.ModuleList | nn.Sequential) and len(parts) > 1 and _size(inner) > total / 2:
            return name, len(parts)
    return None


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


_KEYS = ("layers_per_stage", "ranges", "weights")
_ALLOWED = (
    "a split is 'even', a list of counts, a list of (start, stop) ranges, or one of "
    "{'layers_per_stage': n}, {'ranges': [...]}, {'weights': [...]}, and of a Pipeline {'measured': (x, y)} or "
    "{'measured': profile}"
)


def _numbers(key: str, value: object) -> list[int | float]:
    if not isinstance(value, Sequence) or any(
        isinstance(v, bool) or not isinstance(v, int | float) for v in value
    ):
        raise SplitError(f"{key} must be a list of numbers, got {value!r}")
    return list(value)


def _pairs(value: object) -> list[tuple[int, int]]:
    pairs = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not pairs or any(
        not isinstance(p, Sequence) or len(p) != 2 or not all(isinstance(i, int) for i in p) for p in pairs
    ):
        raise SplitError(f"cannot read the split {value!r}; {_ALLOWED}")
    return [(p[0], p[1]) for p in pairs]


def _fixed(blocks: int, stages: int, each: int) -> list[int]:
    if each < 1:
        raise SplitError(f"layers_per_stage must be at least 1, got {each}")
    last = blocks - each * (stages - 1)
    if not 1 <= last <= each:
        raise SplitError(
            f"{blocks} blocks at {each} per stage make {-(-blocks // each)} stage(s), but there are {stages}"
        )
    return [each] * (stages - 1) + [last]


def _split_blocks(
    layers: Sequence[Layer], stages: int, counts: Sequence[int] | Callable[[int], list[int]]
) -> list[list[Layer]]:
    """Partition the blocks; the first stage also gets the embeddings before them, the last one the heads after them."""
    roles = [layer.role for layer in layers]
    front = next((n for n, role in enumerate(roles) if role != "embedding"), len(roles))
    back = len(roles) - next((n for n, role in enumerate(reversed(roles)) if role != "head"), len(roles))
    blocks = layers[front:back]
    if callable(counts) and len(blocks) < min(stages, len(layers)):
        raise SplitError(
            f"{stages} stages but only {len(blocks)} block(s) among the {len(layers)} layers (an embedding stays with the "
            f"first stage, a head with the last); use at most {len(blocks)} stage(s) (ranks times virtual stages), or a "
            "model with more blocks"
        )
    if misplaced := [layer.name for layer in blocks if layer.role != "block"]:
        raise SplitError(
            f"embedding layers must come first and head layers last; {misplaced[0]!r} is between blocks"
        )
    if callable(counts):
        counts = counts(len(blocks))
    ranges = by_counts(counts, len(blocks), embedding=front > 0, head=back < len(layers))
    parts = _split_ranges(blocks, stages, ranges)
    parts[0] = [*layers[:front], *parts[0]]
    parts[-1] = [*parts[-1], *layers[back:]]
    return parts


def _split_ranges(layers: Sequence[Layer], stages: int, ranges: Ranges) -> list[list[Layer]]:
    if len(ranges) != stages:
        raise SplitError(
            f"the split makes {len(ranges)} stage(s), but there are {stages} (ranks times virtual stages)"
        )
    return [list(layers[start:stop]) for start, stop in ranges]
