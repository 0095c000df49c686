"""An optimizer whose state is divided among the replicas (ZeRO stage 1, 1910.02054, section 5.1).

Parameters live in flat buffers laid out like the buckets of their gradients. The gradients' sums are shared out instead of
given to all: each replica gets its part, updates its part of the parameters with an ordinary optimizer, and the parts
are collected, first those that the next forward needs first, while it already runs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PenstockError
from penstock.parallel.buckets import GradientBuckets, Missing
from penstock.parallel.lane import Lane
from penstock.parallel.layout import BUCKET_BYTES, FIRST_BUCKET_BYTES
from penstock.parallel.local import is_sharded
from penstock.parallel.reducer import Handle, Reducer, part_of
from penstock.parallel.zero_state import ONE_A_PARAMETER, Piece, cut

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
        order, bucket_bytes, first_bucket_bytes, divisor, missing, reduce_dtype: as for `GradientBuckets`. With
            missing="zeros" the optimizer sees zeros.
        options: of the optimizer.

    Attributes:
        buckets: of the gradients.
        optimizer: the torch optimizer; learning-rate schedules take this one.

    Raises:
        ConfigError: an optimizer that is not elementwise, or what `GradientBuckets` refuses.
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
        whole = next((name for name, p in named if is_sharded(p)), None)
        if whole is not None:
            raise ConfigError(
                f"parameter {whole!r} is a DTensor, which does not live in a flat buffer; use the plain optimizer with "
                "GradientBuckets where tensor parallelism cuts parameters"
            )
        group_of = {p: n for n, group in reversed(list(enumerate(groups))) for _, p in group["params"]}
        self.reducer = reducer
        self.buckets = GradientBuckets(
            named, reducer, order=order, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes,
            divisor=divisor, missing=missing, reduce_dtype=reduce_dtype, rebuild=False, sharded=True,
            groups={p: (number, p.dtype) for p, number in group_of.items()},
        )  # fmt: skip
        self.buckets.attach()
        self._flats: list[Tensor] = []
        self._shards: list[nn.Parameter] = []
        self._lanes = [Lane(b.plan.device) for b in self.buckets.buckets]
        self._coming: dict[int, Handle] = {}
        self._bucket = {id(e.parameter): e.bucket for e in self.buckets.entries}
        self._fresh = False
        own: list[dict[str, Any]] = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": []} for group in groups
        ]
        for bucket in self.buckets.buckets:
            members = [self.buckets.entries[m] for m in bucket.plan.members]
            number = group_of[members[0].parameter]
            dtype = members[0].parameter.dtype
            flat = torch.zeros(bucket.plan.elements, dtype=dtype, device=bucket.plan.device)
            for entry in members:
                view = entry.view
                place = flat.as_strided(view.shape, view.stride(), view.storage_offset())
                place.copy_(entry.parameter.detach())
                entry.parameter.data = place
            shard = nn.Parameter(part_of(flat, reducer.rank, reducer.size))
            self._flats.append(flat)
            self._shards.append(shard)
            own[number]["params"].append(shard)
        self.optimizer = kind([group for group in own if group["params"]], **options)
        listed = list(layers)
        covered = {id(p) for layer in listed for p in layer.parameters()}
        self._at_once = [
            n
            for n, bucket in enumerate(self.buckets.buckets)
            if any(id(self.buckets.entries[m].parameter) not in covered for m in bucket.plan.members)
        ]
        self._hooks = [self._overlap(layer) for layer in listed]

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
        if self._fresh:
            raise PenstockError(
                "the last step's gradients are waiting for step() or zero_grad(); to add up several backwards, "
                "run all but the last one inside buckets.accumulating()"
            )
        self.wait_all()
        self.buckets.finish()
        for bucket, shard in zip(self.buckets.buckets, self._shards, strict=True):
            shard.grad = part_of(bucket.flat, self.reducer.rank, self.reducer.size).to(shard.dtype)
        for entry in self.buckets.entries:
            entry.parameter.grad = None
        self._fresh = True

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
        mine = sum(
            float(torch.linalg.vector_norm(s.grad, dtype=torch.float64)) ** 2 for s in self._with_gradients()
        )
        (bits,) = struct.unpack("<q", struct.pack("<d", mine))
        squares = [
            struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in self.reducer.exchange([bits])()
        ]
        total = torch.tensor(sum(squares) ** 0.5)
        nn.utils.clip_grads_with_norm_(self._shards, max_norm, total)
        return total

    def step(self) -> None:
        """Update this replica's part of the parameters and begin to collect the others'.

        Raises:
            PenstockError: there are no reduced gradients.
        """
        self._with_gradients()
        self.optimizer.step()
        self.zero_grad()
        for number in reversed(range(len(self._flats))):  # the first layers' are in the last buckets
            lane, flat = self._lanes[number], self._flats[number]
            lane.admit(flat, [lane.here()])
            with lane.inside():
                self._coming[number] = self.reducer.gather(flat)
        for number in self._at_once:
            self._wait(number)

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for shard in self._shards:
            shard.grad = None
        for entry in self.buckets.entries:
            entry.parameter.grad = None
        self._fresh = False

    def wait(self, parameter: Tensor) -> None:
        """Until a parameter has its new value; others are ignored."""
        number = self._bucket.get(id(parameter))
        if number is not None:
            self._wait(number)

    def wait_all(self) -> None:
        """Until every parameter has its new value: before parameters are read outside of `layers`' forwards."""
        for number in list(self._coming):
            self._wait(number)

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this replica holds."""
        tensors = [
            t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
        ]
        return sum(t.numel() * t.itemsize for t in tensors)

    def local_state_dict(self) -> dict[str, Any]:
        """This replica's part of the state, by parameter name; `join_state_dicts` makes the whole of all parts."""
        parts = {
            name: piece.state(self.optimizer.state[shard])
            for shard, members in self._pieces()
            for name, piece in members
            if shard in self.optimizer.state
        }
        return {"state": parts, "param_groups": self._groups_by_name()}

    def state_dict(self) -> dict[str, Any]:
        """The whole state on every replica, by parameter name, in the parameters' shapes; every replica calls it."""
        state: dict[str, dict[str, Any]] = {e.name: {} for e in self.buckets.entries}
        for bucket, shard in zip(self.buckets.buckets, self._shards, strict=True):
            members = [self.buckets.entries[m] for m in bucket.plan.members]
            for key, value in self.optimizer.state.get(shard, {}).items():
                if key in ONE_A_PARAMETER or value is None:
                    for entry in members:
                        state[entry.name][key] = value
                    continue
                flat = torch.empty(bucket.plan.elements, dtype=value.dtype, device=value.device)
                part_of(flat, self.reducer.rank, self.reducer.size).copy_(value)
                self.reducer.gather(flat).wait()
                for entry in members:
                    view = entry.view
                    place = flat.as_strided(view.shape, view.stride(), view.storage_offset())
                    state[entry.name][key] = place.clone()
        return {
            "state": {n: s for n, s in state.items() if s},
            "param_groups": self._groups_by_name(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` or `join_state_dicts` gave, whatever the number of replicas then.

        Raises:
            ConfigError: a parameter is missing in it, or has another shape.
        """
        for shard, members in self._pieces() if state["state"] else ():
            self.optimizer.state[shard] = cut(state["state"], members, shard)
        by_name = {name: group for group in state["param_groups"] for name in group["params"]}
        for group, names in zip(self.param_groups, self._names(), strict=True):
            given = by_name.get(names[0])
            if given is None:
                raise ConfigError(f"the state has no options for parameter {names[0]!r}")
            group.update({k: v for k, v in given.items() if k != "params"})

    def _pieces(self) -> Iterator[tuple[nn.Parameter, list[tuple[str, Piece]]]]:
        """Each part, and which pieces of which parameters are in it."""
        for bucket, shard in zip(self.buckets.buckets, self._shards, strict=True):
            begin, size = self.reducer.rank * shard.numel(), shard.numel()
            starts = zip(bucket.plan.members, bucket.plan.starts, strict=True)
            members = [(self.buckets.entries[m], start - begin) for m, start in starts]
            yield shard, [(entry.name, Piece.of(entry.view, start, size)) for entry, start in members]

    def _names(self) -> list[list[str]]:
        """The parameters of each of the torch optimizer's groups."""
        held = {
            id(s): [self.buckets.entries[m].name for m in b.plan.members]
            for b, s in zip(self.buckets.buckets, self._shards, strict=True)
        }
        return [
            [name for shard in group["params"] for name in held[id(shard)]] for group in self.param_groups
        ]

    def _groups_by_name(self) -> list[dict[str, Any]]:
        return [
            {**{k: v for k, v in group.items() if k != "params"}, "params": names}
            for group, names in zip(self.param_groups, self._names(), strict=True)
        ]

    def _with_gradients(self) -> list[nn.Parameter]:
        if not self._fresh:
            raise PenstockError("there are no reduced gradients; run a backward inside reducing() first")
        return self._shards

    def _wait(self, number: int) -> None:
        handle = self._coming.pop(number, None)
        if handle is not None:
            with self._lanes[number].inside():
                handle.wait()
            self._lanes[number].join()

    def _overlap(self, layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        numbers = sorted(
            {self._bucket[id(p)] for p in layer.parameters() if id(p) in self._bucket}, reverse=True
        )

        def before(module: nn.Module, args: Any) -> None:
            for number in numbers if self._coming else ():
                self._wait(number)

        return layer.register_forward_pre_hook(before)


def _as_groups(parameters: Any) -> list[dict[str, Any]]:
    if isinstance(parameters, nn.Module):
        return [{"params": list(parameters.named_parameters())}]
    listed = list(parameters)
    if listed and isinstance(listed[0], dict):
        return [{**group, "params": list(group["params"])} for group in listed]
    return [{"params": listed}]
