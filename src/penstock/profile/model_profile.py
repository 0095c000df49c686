"""Profile of a model: the cost of every layer as a function of microbatch, sequence and tensor-parallel degree.

A profile comes from a model's sizes in closed form, from a trace of its layers on fake tensors, or from measurements on a
device. It is read, written and used without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from penstock.base.atomic import write_text
from penstock.base.bounded_io import MEGABYTE, parse_json, read_bytes
from penstock.base.errors import ConfigError
from penstock.base.tables import Count, Flag, NotNegative, Table, explain
from penstock.profile.adapters import frozen, with_adapters
from penstock.profile.closed_form import (
    Dtype,
    Workload,
    block_cost,
    embedding_cost,
    head_cost,
    require_divisible,
    require_positions,
)
from penstock.profile.layer_cost import Amount, LayerCost
from penstock.profile.model_shape import ModelShape
from penstock.profile.read_shape import read_shape
from penstock.profile.selective import require_modules, with_modules

Source = Literal["sizes", "traced", "measured"]
Role = Literal["embedding", "block", "head"]
FORMAT = 1
SEQUENCE = 2048
"""Tokens of a sample where nothing says otherwise."""
_MAX_BYTES = 256 * MEGABYTE
_CONSTANT = {f.name for f in fields(LayerCost) if "parameters" in f.name} | {"frozen_bytes", "recomputes"}
"""Fields of a cost that are the same for every microbatch."""
_WORKS = ("forward", "input_grad", "weight_grad", "selective", "backward", "again")


@dataclass(frozen=True)
class ProfiledLayer(Table):
    """Costs of one kind of layer at several sizes of a microbatch.

    Attributes:
        points: (samples of a microbatch, cost) pairs, by growing microbatch.
    """

    points: tuple[tuple[Count, LayerCost], ...]

    def at(self, microbatch: int) -> LayerCost:
        """Return the cost at a microbatch, on the line through the two nearest points."""
        points = self.points
        if len(points) == 1:
            size, cost = points[0]
            return cost if size == microbatch else _scaled(cost, microbatch / size)
        after = next((n for n, (size, _) in enumerate(points) if size >= microbatch), len(points) - 1)
        # Below the smallest size, the line through the first two counts.
        after = max(after, 1)
        (low, first), (high, second) = points[after - 1], points[after]
        weight = (microbatch - low) / (high - low)
        return _mix(first, second, weight)


@dataclass(frozen=True)
class LayerTable:
    """Layers of a model under one workload.

    Attributes:
        costs: cost of each kind of layer.
        kinds: kind of every layer in order, an index of `costs`.
        roles: role of every layer in order.
        names: name of every layer in order.
        tied: number of parameters on a device that the last layer shares with the first, if one stage has both.
    """

    costs: tuple[LayerCost, ...]
    kinds: tuple[int, ...]
    roles: tuple[Role, ...]
    names: tuple[str, ...]
    tied: float = 0


@dataclass(frozen=True, kw_only=True)
class RuntimeCosts(Table):
    """Seconds that the runtime adds to ops, and how much ops slow each other down, as fitted to steps of pipelines.

    Attributes:
        forward, backward, input_grad, weight_grad: seconds added to every F, B, I and W.
        prepare: seconds by which the forward of a layer takes longer if its backward is split.
        segment: seconds of every segment but the first into which recompute divides the forward of a stage.
        beside_forward, beside_backward, beside_input_grad, beside_weight_grad: share of an F, B, I and W in which it
            competes with other ranks for the interpreter or the memory. An op takes 1 + a × b times as long beside one
            other rank, where a is its share and b the share of the other rank's op.
    """

    forward: Amount = 0.0
    backward: Amount = 0.0
    input_grad: Amount = 0.0
    weight_grad: Amount = 0.0
    prepare: Amount = 0.0
    segment: Amount = 0.0
    beside_forward: Amount = 0.0
    beside_backward: Amount = 0.0
    beside_input_grad: Amount = 0.0
    beside_weight_grad: Amount = 0.0


@dataclass(frozen=True, kw_only=True)
class Profile(Table):
    """Costs of a model's layers.

    Attributes:
        name: name of the model.
        source: "sizes" (closed form), "traced" or "measured".
        shape: sizes of the model; None unless the source is "sizes".
        sequence: tokens of a sample that traced and measured costs are for.
        dtype: dtype of traced and measured costs.
        kinds: costs of each kind of layer, unless the source is "sizes".
        layers: (name, role, kind) of every layer in order, unless the source is "sizes".
        tied: number of parameters that traced layers share with earlier ones.
        machine: description of the device that was measured.
        op_overhead: measured seconds that the runtime adds to each op.
        step_overhead: measured seconds that the runtime adds to each step, optimizer included.
        spread: measured relative spread of repeated steps.
        autocast: True if traced or measured costs are of mixed precision in `dtype`.
        runtime: costs of the runtime and of ranks side by side, if they were fitted to steps of pipelines.
    """

    name: str
    source: Source = "sizes"
    shape: ModelShape | None = None
    sequence: Count | None = None
    dtype: Dtype = "fp32"
    kinds: tuple[ProfiledLayer, ...] = ()
    layers: tuple[tuple[str, Role, NotNegative], ...] = ()
    tied: NotNegative = 0
    machine: Mapping[str, Any] = field(default_factory=dict)
    op_overhead: Amount = 0.0
    step_overhead: Amount = 0.0
    spread: Amount = 0.0
    autocast: Flag = False
    runtime: RuntimeCosts | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks, which a split hands out."""
        if self.shape is not None:
            return self.shape.layers
        return sum(role == "block" for _, role, _ in self.layers)

    @property
    def parameters(self) -> float:
        """Number of parameters of the model; a tied weight counts once."""
        if self.shape is not None:
            return self.shape.parameters
        costs = [self.kinds[kind].points[0][1] for *_, kind in self.layers]
        return sum(cost.parameters + cost.frozen_parameters for cost in costs) - self.tied

    def table(self, load: Workload) -> LayerTable:
        """Return the costs of all layers under a load.

        Raises:
            ConfigError: if tensor parallelism does not divide the model, a sample has more tokens than the model has learned
                positions, or the profile has no costs for the workload.
        """
        if self.shape is not None:
            require_divisible(self.shape, load.tp, load.ep)
            require_positions(self.shape, load.sequence)
            require_modules(self.shape, load.modules)
            n, dense = self.shape.layers, self.shape.dense_layers
            blocks: list[Role] = ["block"] * n
            costs: tuple[LayerCost, ...] = (
                embedding_cost(self.shape, load),
                with_modules(self.shape, block_cost(self.shape, load), load),
                head_cost(self.shape, load),
            )
            if self.shape.adapter_rank:
                first, block, last = costs
                ends = (frozen(self.shape, each, load) for each in (first, last))
                costs = (next(ends), with_adapters(self.shape, block, load), next(ends))
            if dense:
                alone = replace(load, ep=1)
                costs = (*costs, with_modules(self.shape.dense, block_cost(self.shape.dense, alone), alone))
            return LayerTable(
                costs,
                (0, *(3 if k < dense else 1 for k in range(n)), 2),
                ("embedding", *blocks, "head"),
                ("embedding", *(f"blocks.{k}" for k in range(n)), "head"),
                self.shape.hidden * self.shape.vocabulary / load.tp
                if self.shape.tied and not self.shape.adapter_rank
                else 0,
            )
        if load.modules:
            raise ConfigError(
                f"recompute={'+'.join(load.modules)}: the profile of {self.name} is of whole layers, which does not tell "
                "modules apart; take none, full or a number"
            )
        if load.ep != 1:
            raise ConfigError(
                f"ep divides experts, which the profile of {self.name} does not tell apart, so ep must be 1, got {load.ep}"
            )
        if load.tp != 1:
            raise ConfigError(
                f"the profile of {self.name} was {self.source} without tensor parallelism, so tp must be 1, got {load.tp}"
            )
        if self.sequence is not None and load.sequence != self.sequence:
            raise ConfigError(
                f"the profile of {self.name} was {self.source} with samples of {self.sequence} tokens, got {load.sequence}; "
                "profile the model again"
            )
        return LayerTable(
            tuple(kind.at(load.microbatch) for kind in self.kinds),
            tuple(kind for *_, kind in self.layers),
            tuple(role for _, role, _ in self.layers),
            tuple(name for name, *_ in self.layers),
            self.tied,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as plain values, as in its file."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the profile to a path, as JSON."""
        write_text(Path(path), json.dumps(self.as_dict(), indent=1, default=_plain) + "\n")


_PROFILE = TypeAdapter(Profile)


def default_sequence(profile: Profile) -> int:
    """Return the tokens of a sample where nothing says otherwise.

    For a profile of layers, they are its own, or 1 if its samples have no tokens; 2048 for a model of given sizes, or
    as many as the model allows.
    """
    shape = profile.shape
    if shape is None:
        return profile.sequence or 1
    return min(SEQUENCE, shape.positions or shape.context or SEQUENCE)


def with_positions(profile: Profile, positions: int) -> Profile:
    """Return the profile of a model that takes samples of up to so many tokens.

    Raises:
        ConfigError: if the profile is of layers, or the model takes longer samples already.
    """
    shape = profile.shape
    if shape is None:
        raise ConfigError(
            f"the layers of {profile.name} were profiled with samples of their own length; profile them with longer ones"
        )
    most = shape.positions or shape.context
    if positions < most:
        raise ConfigError(
            f"{profile.name} takes samples of up to {most:,} tokens already, got --positions {positions:,}; give more, or "
            "leave it out"
        )
    if shape.positions:
        return replace(profile, shape=replace(shape, positions=positions))
    return replace(profile, shape=replace(shape, context=positions))


def with_lora(profile: Profile, rank: int, base_bits: int = 16) -> Profile:
    """Return the profile of a model whose blocks have trained adapters of a rank beside a frozen base of 16 or 4 bits."""
    if profile.shape is None:
        raise ConfigError(
            f"{profile.name} has no closed form; profile it with its adapters by penstock.profile_layers"
        )
    return replace(profile, shape=replace(profile.shape, adapter_rank=rank, base_bits=base_bits))


def of_shape(shape: ModelShape) -> Profile:
    """Return the profile of a model with a shape, in closed form."""
    return Profile(name=shape.name, source="sizes", shape=shape)


def read_model(path: str | Path) -> Profile:
    """Return the profile of a model.

    Args:
        path: a ``config.json`` or a folder with one, a TOML file with ``[model]``, or a profile that `Profile.save` wrote.

    Raises:
        ConfigError: if there is no such file, or it describes no model that can be costed.
    """
    return read_profile(path) if is_profile(path) else of_shape(read_shape(path))


def is_profile(path: str | Path) -> bool:
    """Return whether a file is one that `Profile.save` wrote, and not a model's config."""
    path = Path(path)
    if path.suffix != ".json" or path.name == "config.json":
        return False
    try:
        table = json.loads(read_bytes(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(table, dict) and "format" in table and "kinds" in table


def read_profile(path: str | Path) -> Profile:
    """Read a profile that `Profile.save` wrote."""
    try:
        table = parse_json(read_bytes(Path(path), _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the profile {str(path)!r}: {error}") from error
    if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
        raise ConfigError(
            f"{path} is not a profile of format {FORMAT}; make one with penstock.profile_layers"
        )
    try:
        if table.get("shape") is not None:
            table["shape"] = ModelShape(**table["shape"])
        profile = _PROFILE.validate_python(table)
        _require_sound(profile)
    except (TypeError, ValueError) as error:
        reason = explain(error) if isinstance(error, ValidationError) else error
        raise ConfigError(f"{path} is not a valid profile: {reason}; make it again") from error
    return profile


def _require_sound(profile: Profile) -> None:
    """Raise `ValueError` if values of a profile contradict each other."""
    _require("shape", (profile.shape is not None) == (profile.source == "sizes"), profile.shape)
    _require("layers", profile.shape is not None or profile.blocks > 0, profile.layers)
    for *_, kind in profile.layers:
        _require("kind", kind < len(profile.kinds), kind)
    for points in (kind.points for kind in profile.kinds):
        sizes = [size for size, _ in points]
        _require("microbatches", bool(sizes) and sizes == sorted(set(sizes)), sizes)
        works = {tuple(len(getattr(cost, name)) for name in _WORKS) for _, cost in points}
        _require("operations", len(works) == 1, works)


def _require(key: str, sound: bool, value: object) -> None:
    if not sound:
        raise ValueError(f"{key} is {value!r}")


def _mix(first: LayerCost, second: LayerCost, weight: float) -> LayerCost:
    """Return the cost on the line through two, at `weight` from the first (0) to the second (1) or beyond."""
    values: dict[str, Any] = {}
    for f in fields(LayerCost):
        a, b = getattr(first, f.name), getattr(second, f.name)
        if isinstance(a, tuple):
            values[f.name] = tuple(
                x._replace(amount=max(0.0, x.amount + weight * (y.amount - x.amount)))
                for x, y in zip(a, b, strict=True)
            )
        elif f.name not in _CONSTANT:
            values[f.name] = max(0.0, a + weight * (b - a))
    return replace(first, **values)


def _scaled(cost: LayerCost, ratio: float) -> LayerCost:
    """Return a cost with all amounts times `ratio`."""
    values: dict[str, Any] = {}
    for f in fields(LayerCost):
        value = getattr(cost, f.name)
        if isinstance(value, tuple):
            values[f.name] = tuple(work._replace(amount=work.amount * ratio) for work in value)
        elif f.name not in _CONSTANT:
            values[f.name] = value * ratio
    return replace(cost, **values)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"no JSON for {type(value).__name__}")
