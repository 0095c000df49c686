"""An optimizer whose state is divided among the replicas (ZeRO stage 1): `Shards` in a user's hands."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PenstockError
from penstock.parallel.data.layout import BUCKET_BYTES, FIRST_BUCKET_BYTES
from penstock.parallel.data.leftovers import Missing
from penstock.parallel.data.reducer import Reducer
from penstock.parallel.data.shard_slice import ONE_A_PARAMETER, joined
from penstock.parallel.data.shards import ShardedParameter, Shards
from penstock.parallel.dtensor import is_dtensor

NOT_ELEMENTWISE = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})
"""Optimizers whose update of an element depends on others; cut parameters would change what they do."""


class ShardedOptimizer:
    """A torch optimizer over this replica's part of the parameters.

    Every replica makes one at the same time and takes the same steps::

        optimizer = ShardedOptimizer(model, torch.optim.AdamW, GroupReducer(), lr=3e-4, layers=model.blocks)
        with optimizer.reducing():
            loss_fn(model(x), y).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    After a reduction no replica has whole gradients, so ``.grad`` is None; the parts are in `optimizer`'s parameters.

    Args:
        parameters: a module, (name, parameter) pairs, or groups of them: dicts with pairs under "params", and options.
        kind: an optimizer class that updates every element by itself, such as ``torch.optim.AdamW``.
        reducer: this replica's end of the communicator.
        layers: modules whose forwards wait for the parameters below them, so that collecting overlaps with them.
            Parameters of no such module are waited for in `step`.
        order, bucket_bytes, first_bucket_bytes, divisor, missing, reduce_dtype: as for `GradientBuckets`.
        options: of the optimizer.

    Attributes:
        buckets: of the gradients.
        optimizer: the torch optimizer, over pieces of parameters; learning-rate schedules take this one.

    Raises:
        ConfigError: an optimizer that is not elementwise, a DTensor among the parameters, or what `GradientBuckets` refuses.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[tuple[str, Tensor]] | Sequence[dict[str, Any]],
        kind: type[torch.optim.Optimizer],
        reducer: Reducer,
        *,
        layers: Iterable[nn.Module] = (),
        order: Sequence[Tensor] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        divisor: float | None = None,
        missing: Missing = "error",
        reduce_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if kind.__name__ in NOT_ELEMENTWISE:
            raise ConfigError(
                f"{kind.__name__} does not update every element by itself, so its state cannot be divided; "
                "use an elementwise optimizer, such as AdamW or SGD, or the plain one on every replica"
            )
        groups = _as_groups(parameters)
        named = [(name, p) for group in groups for name, p in group["params"]]
        cut = next((name for name, p in named if is_dtensor(p)), None)
        if cut is not None:
            raise ConfigError(
                f"parameter {cut!r} is a DTensor, and norms and states here are of whole parameters; use "
                "PipelineOptimizer(zero=True), which knows of those that tensor parallelism has cut"
            )
        self.reducer = reducer
        self.shards = Shards(
            named, reducer, order=order, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes,
            divisor=divisor, missing=missing, reduce_dtype=reduce_dtype,
        )  # fmt: skip
        self.buckets = self.shards.buckets
        self.buckets.attach()
        seen: set[int] = set()
        self._members: list[list[ShardedParameter]] = []
        for group in groups:
            mine = [part for _, p in group["params"] if (part := self.shards.part(p)) and id(p) not in seen]
            seen |= {id(part.entry.parameter) for part in mine}
            self._members.append(mine)
        self.optimizer = kind(
            [
                {**group, "params": [part.own for part in mine if part.own is not None]}
                for group, mine in zip(groups, self._members, strict=True)
            ],
            **options,
        )
        listed = list(layers)
        covered = {id(p) for layer in listed for p in layer.parameters()}
        self._at_once = self.shards.waiter(
            e.parameter for e in self.buckets.entries if id(e.parameter) not in covered
        )
        for layer in listed:
            _before(layer, self.shards.waiter(layer.parameters()))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's groups; options set here count."""
        return self.optimizer.param_groups

    def begin(self, contributions: int | Mapping[Tensor, int] = 1, step: int | None = None) -> None:
        """As `GradientBuckets.begin`."""
        self.buckets.begin(contributions, step)

    def finish(self) -> None:
        """As `GradientBuckets.finish`; afterwards this replica has its part of the gradients.

        Raises:
            PenstockError: the gradients of the step before have not been used.
        """
        self.shards.require_used()
        self.shards.wait_all()
        self.shards.finish()

    @contextmanager
    def reducing(
        self, contributions: int | Mapping[Tensor, int] = 1, step: int | None = None
    ) -> Iterator[None]:
        """`begin`, and `finish` after the body; if it fails, the other replicas are told."""
        self.begin(contributions, step)
        try:
            yield
        except Exception as error:
            self.buckets.abandon(error)
            raise
        except BaseException:
            self.buckets.reset()
            raise
        self.finish()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`.

        Returns:
            0-d tensor, float32: the norm before, over all replicas' parts; the same number on every replica.
        """
        owned = self._with_gradients()
        mine = sum(
            float(torch.linalg.vector_norm(own.grad, dtype=torch.float64)) ** 2
            for own in owned
            if own.grad is not None
        )
        (bits,) = struct.unpack("<q", struct.pack("<d", mine))
        squares = [
            struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in self.reducer.exchange([bits])()
        ]
        total = torch.tensor(sum(squares) ** 0.5)
        nn.utils.clip_grads_with_norm_(owned, max_norm, total)
        return total

    def step(self) -> None:
        """Update this replica's part of the parameters and begin to collect the others'.

        Raises:
            PenstockError: there are no reduced gradients.
        """
        self._with_gradients()
        self.optimizer.step()
        self.zero_grad()
        self.shards.collect()
        self._at_once()

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        self.shards.drop()

    def wait(self, parameter: Tensor) -> None:
        """Until a parameter has its new value; others are ignored."""
        self.shards.wait(parameter)

    def wait_all(self) -> None:
        """Until every parameter has its new value: before parameters are read outside of `layers`' forwards."""
        self.shards.wait_all()

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this replica holds."""
        tensors = [
            t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
        ]
        return sum(t.numel() * t.itemsize for t in tensors)

    def local_state_dict(self) -> dict[str, Any]:
        """This replica's part of the state, by parameter name; `join_state_dicts` makes the whole of all parts."""
        parts = {
            part.entry.name: (part.piece, {k: _copied(v) for k, v in own.items()})
            for part in self.shards.parts
            if (own := self._entries(part)) is not None
        }
        replica = (self.reducer.rank, self.reducer.size)
        return {"state": parts, "param_groups": self._groups_by_name(), "replica": replica}

    def state_dict(self) -> dict[str, Any]:
        """The whole state on every replica, by parameter name, in the parameters' shapes; every replica calls it.

        Tensors are on the CPU.
        """
        names = {id(e.parameter): e.name for e in self.buckets.entries}
        state = {names[id(p)]: entries for p, entries in self.shards.join(self._entries)}
        return {"state": state, "param_groups": self._groups_by_name()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` or `join_state_dicts` gave, whatever the number of replicas then.

        Raises:
            ConfigError: a parameter is missing in it, or has another shape.
        """
        parts = self.shards.parts if state["state"] else []
        entries: dict[Tensor, Any] = {
            part.own: _cut(state["state"], part) for part in parts if part.own is not None
        }
        self.optimizer.state.update(entries)
        by_name = {name: group for group in state["param_groups"] for name in group["params"]}
        for group, members in zip(self.param_groups, self._members, strict=True):
            for name in [part.entry.name for part in members][:1]:
                if name not in by_name:
                    raise ConfigError(f"the state has no options for parameter {name!r}")
                group.update({k: v for k, v in by_name[name].items() if k != "params"})

    def _entries(self, part: ShardedParameter) -> dict[str, Any] | None:
        entries = self.optimizer.state.get(part.own) if part.own is not None else None
        return None if not entries else {k: v for k, v in entries.items() if v is not None}

    def _groups_by_name(self) -> list[dict[str, Any]]:
        return [
            {**group, "params": [part.entry.name for part in members]}
            for group, members in zip(self.param_groups, self._members, strict=True)
        ]

    def _with_gradients(self) -> list[nn.Parameter]:
        if not self.shards.fresh:
            raise PenstockError("there are no reduced gradients; run a backward inside reducing() first")
        return self.shards.owned()


def join_state_dicts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole state of all replicas' parts, as `ShardedOptimizer.local_state_dict` gives them.

    Raises:
        ConfigError: a replica's part is not there, or there twice.
    """
    given, size = [part["replica"][0] for part in parts], parts[0]["replica"][1]
    if sorted(given) != list(range(size)):
        raise ConfigError(
            f"parts of replicas {given} out of {size}; give the part of every replica, each once"
        )
    names = dict.fromkeys(name for part in parts for name in part["state"])
    state = {name: joined([part["state"][name] for part in parts if name in part["state"]]) for name in names}
    return {"state": state, "param_groups": parts[0]["param_groups"]}


def _cut(state: Mapping[str, Mapping[str, Any]], part: ShardedParameter) -> dict[str, Any]:
    """An optimizer's entries for a piece, out of those for the parameter."""
    name, piece, own = part.entry.name, part.piece, part.own
    assert own is not None
    if name not in state:
        raise ConfigError(f"the state has nothing for parameter {name!r}; it has {', '.join(state)}")
    found = {}
    for key, value in state[name].items():
        if key in ONE_A_PARAMETER or not isinstance(value, Tensor):
            found[key] = _copied(value)
            continue
        if not piece.covers(key, value):
            raise ConfigError(
                f"{key!r} of parameter {name!r} has shape {tuple(value.shape)} in the state, but the parameter has "
                f"{piece.shape}"
            )
        found[key] = piece.of(value).to(own.device, copy=True)
    return found


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _before(layer: nn.Module, wait: Any) -> None:
    layer.register_forward_pre_hook(lambda module, args: wait())


def _as_groups(parameters: Any) -> list[dict[str, Any]]:
    if isinstance(parameters, nn.Module):
        return [{"params": list(parameters.named_parameters())}]
    listed = list(parameters)
    if listed and isinstance(listed[0], dict):
        return [{**group, "params": list(group["params"])} for group in listed]
    return [{"params": listed}]
