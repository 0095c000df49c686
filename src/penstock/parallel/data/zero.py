"""An optimizer whose state is divided among the replicas (ZeRO stage 1), for use outside of a Pipeline."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PenstockError
from penstock.parallel.data.bucket_options import Missing
from penstock.parallel.data.layout import BUCKET_BYTES, FIRST_BUCKET_BYTES
from penstock.parallel.data.reducer import Reducer
from penstock.parallel.data.shard_slice import ONE_A_PARAMETER, join_shards
from penstock.parallel.data.shards import ShardedParameter, Shards
from penstock.parallel.dtensor import is_dtensor

NOT_ELEMENTWISE = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})
"""Optimizers whose update of an element depends on other elements, so that sharding would change their results."""


class ShardedOptimizer:
    """A torch optimizer over this replica's shards of the parameters.

    Every replica makes one at the same time and takes the same steps::

        optimizer = ShardedOptimizer(model, torch.optim.AdamW, GroupReducer(), lr=3e-4, layers=model.blocks)
        with optimizer.reducing():
            loss_fn(model(x), y).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    After a reduction no replica has full gradients, so ``.grad`` is None; the parameters of `optimizer` have the shards.

    Args:
        parameters: a module, (name, parameter) pairs, or groups: dicts of options with such pairs under "params".
        kind: optimizer class that updates each element independently, such as ``torch.optim.AdamW``.
        reducer: this replica's end of the communicator.
        layers: modules whose forwards wait for their parameters, so that gathering overlaps with the forward (default
            none). `step` waits for all other parameters.
        order, bucket_bytes, first_bucket_bytes, divisor, missing, reduce_dtype: options of `GradientBuckets`.
        options: options of the optimizer, such as ``lr``.

    Attributes:
        buckets: buckets of the gradients.
        optimizer: torch optimizer over the shards; pass this one to learning-rate schedulers.

    Raises:
        ConfigError: if the optimizer is not elementwise, a parameter is a DTensor, or `GradientBuckets` raises it.
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
        distributed = next((name for name, p in named if is_dtensor(p)), None)
        if distributed is not None:
            raise ConfigError(
                f"parameter {distributed!r} is a DTensor, but norms and states here are of full parameters; use "
                "PipelineOptimizer(zero=True), which supports tensor parallelism"
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
            members = [s for _, p in group["params"] if (s := self.shards.find(p)) and id(p) not in seen]
            seen |= {id(sharded.entry.parameter) for sharded in members}
            self._members.append(members)
        self.optimizer = kind(
            [
                {**group, "params": [sharded.shard for sharded in members if sharded.shard is not None]}
                for group, members in zip(groups, self._members, strict=True)
            ],
            **options,
        )
        layers = list(layers)
        in_layers = {id(p) for layer in layers for p in layer.parameters()}
        self._wait_for_others = self.shards.waiter(
            e.parameter for e in self.buckets.entries if id(e.parameter) not in in_layers
        )
        for layer in layers:
            _call_before_forward(layer, self.shards.waiter(layer.parameters()))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The torch optimizer's groups; changes of their options take effect."""
        return self.optimizer.param_groups

    def begin(self, contributions: int | Mapping[Tensor, int] = 1, step: int | None = None) -> None:
        """Begin a step with `contributions`, as `GradientBuckets.begin` does."""
        self.buckets.begin(contributions, step)

    def finish(self) -> None:
        """End a step; see `GradientBuckets.finish`. Afterwards this replica has the gradients of its shards.

        Raises:
            PenstockError: if the gradients of the previous step have not been used.
        """
        self.shards.require_used()
        self.shards.wait_all()
        self.shards.finish()

    @contextmanager
    def reducing(
        self, contributions: int | Mapping[Tensor, int] = 1, step: int | None = None
    ) -> Iterator[None]:
        """Call `begin` with `contributions` and `step`, then `finish`; report a failure of the body to the others."""
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
            Norm before clipping over all replicas' shards, a 0-d float32 tensor with the same number on every replica.
        """
        shards = self._require_gradients()
        square = sum(
            float(torch.linalg.vector_norm(shard.grad, dtype=torch.float64)) ** 2
            for shard in shards
            if shard.grad is not None
        )
        (bits,) = struct.unpack("<q", struct.pack("<d", square))
        squares = [
            struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in self.reducer.exchange([bits])()
        ]
        total = torch.tensor(sum(squares) ** 0.5)
        nn.utils.clip_grads_with_norm_(shards, max_norm, total)
        return total

    def step(self) -> None:
        """Update this replica's shards and start to gather the others'.

        Raises:
            PenstockError: if there are no reduced gradients.
        """
        self._require_gradients()
        self.optimizer.step()
        self.zero_grad()
        self.shards.collect()
        self._wait_for_others()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.shards.drop()

    def wait(self, parameter: Tensor) -> None:
        """Wait until a parameter has its new value; parameters that are not sharded are ignored."""
        self.shards.wait(parameter)

    def wait_all(self) -> None:
        """Wait until every parameter has its new value; call it before parameters are read outside of `layers`' forwards."""
        self.shards.wait_all()

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state that this replica holds."""
        tensors = [
            t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
        ]
        return sum(t.numel() * t.itemsize for t in tensors)

    def local_state_dict(self) -> dict[str, Any]:
        """Return this replica's state by parameter name; `join_state_dicts` joins those of all replicas."""
        state = {
            sharded.entry.name: (sharded.slice, {k: _clone(v) for k, v in entries.items()})
            for sharded in self.shards.sharded
            if (entries := self._entries(sharded)) is not None
        }
        replica = (self.reducer.rank, self.reducer.size)
        return {"state": state, "param_groups": self._groups_by_name(), "replica": replica}

    def state_dict(self) -> dict[str, Any]:
        """Return the full state by parameter name, in the parameters' shapes and on the CPU; every replica calls it."""
        names = {id(e.parameter): e.name for e in self.buckets.entries}
        state = {names[id(p)]: entries for p, entries in self.shards.join(self._entries)}
        return {"state": state, "param_groups": self._groups_by_name()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict` or `join_state_dicts`, from any number of replicas.

        Raises:
            ConfigError: if a parameter is missing in the state, or has another shape.
        """
        loaded = self.shards.sharded if state["state"] else []
        entries: dict[Tensor, Any] = {
            sharded.shard: _shard_entries(state["state"], sharded)
            for sharded in loaded
            if sharded.shard is not None
        }
        self.optimizer.state.update(entries)
        by_name = {name: group for group in state["param_groups"] for name in group["params"]}
        for group, members in zip(self.param_groups, self._members, strict=True):
            for name in [sharded.entry.name for sharded in members][:1]:
                if name not in by_name:
                    raise ConfigError(f"the state has no options for parameter {name!r}")
                group.update({k: v for k, v in by_name[name].items() if k != "params"})

    def _entries(self, sharded: ShardedParameter) -> dict[str, Any] | None:
        entries = self.optimizer.state.get(sharded.shard) if sharded.shard is not None else None
        return None if not entries else {k: v for k, v in entries.items() if v is not None}

    def _groups_by_name(self) -> list[dict[str, Any]]:
        return [
            {**group, "params": [sharded.entry.name for sharded in members]}
            for group, members in zip(self.param_groups, self._members, strict=True)
        ]

    def _require_gradients(self) -> list[nn.Parameter]:
        if not self.shards.has_unused_sums:
            raise PenstockError("there are no reduced gradients; run a backward inside reducing() first")
        return self.shards.owned()


def join_state_dicts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the states of all replicas, as `ShardedOptimizer.local_state_dict` returns them.

    Raises:
        ConfigError: if a replica's part is missing, or there twice.
    """
    replicas, size = [part["replica"][0] for part in parts], parts[0]["replica"][1]
    if sorted(replicas) != list(range(size)):
        raise ConfigError(
            f"parts of replicas {replicas} out of {size}; give the part of every replica, each once"
        )
    names = dict.fromkeys(name for part in parts for name in part["state"])
    state = {
        name: join_shards([part["state"][name] for part in parts if name in part["state"]]) for name in names
    }
    return {"state": state, "param_groups": parts[0]["param_groups"]}


def _shard_entries(state: Mapping[str, Mapping[str, Any]], sharded: ShardedParameter) -> dict[str, Any]:
    """Return the state entries of a shard, out of those of the full parameter."""
    name, elements, shard = sharded.entry.name, sharded.slice, sharded.shard
    assert shard is not None
    if name not in state:
        raise ConfigError(f"the state has nothing for parameter {name!r}; it has {', '.join(state)}")
    entries = {}
    for key, value in state[name].items():
        if key in ONE_A_PARAMETER or not isinstance(value, Tensor):
            entries[key] = _clone(value)
            continue
        if not elements.covers(key, value):
            raise ConfigError(
                f"{key!r} of parameter {name!r} has shape {tuple(value.shape)} in the state, but the parameter has "
                f"{elements.shape}"
            )
        entries[key] = elements.of(value).to(shard.device, copy=True)
    return entries


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _call_before_forward(layer: nn.Module, wait: Any) -> None:
    layer.register_forward_pre_hook(lambda module, args: wait())


def _as_groups(parameters: Any) -> list[dict[str, Any]]:
    if isinstance(parameters, nn.Module):
        return [{"params": list(parameters.named_parameters())}]
    groups = list(parameters)
    if groups and isinstance(groups[0], dict):
        return [{**group, "params": list(group["params"])} for group in groups]
    return [{"params": groups}]
