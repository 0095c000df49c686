"""Loss of a part of each sample's tokens (context parallelism), and the check that it may be divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from penstock.base.errors import ConfigError
from penstock.parallel.context.attention import PartExchange, SequencePart
from penstock.parallel.context.few_tokens import dims_of, few_of, whole_of
from penstock.parallel.dtensor import local


class DividedLoss:
    """A loss function of a part of each sample's tokens; called as the function itself.

    The first call whose few tokens have a loss also computes it and its gradient for all processes' tokens together. A
    function that gives other values then uses other tokens, as one that shifts its targets does, counts others than are
    known, or weighs samples alike whose tokens do not count equally often. So that it counts some of one part of some
    samples alone, values that the targets have are also put in the place of others.

    Args:
        weight: function from a target to its weight; None for a sum.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        part: SequencePart,
        exchange: PartExchange,
        weight: Callable[[Any], object] | None,
    ) -> None:
        self._function, self._part, self._exchange = function, part, exchange
        self._weight = weight
        self._checked: set[bool] = set()  # whether samples were several: one is not weighed against others

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the loss of this process's tokens."""
        if True not in self._checked:
            self._check_once(output, target)
        return self._function(output, target)

    def _check_once(self, output: Any, target: Any) -> None:
        """Check the loss, unless it was checked with as many samples: one, or several."""
        shapes = [
            x.shape for x in _pytree.tree_leaves((output, target)) if isinstance(x, Tensor) and x.dim() > 1
        ]
        several = bool(shapes) and shapes[0][0] > 1
        if several not in self._checked:
            with torch.no_grad(), torch.random.fork_rng([]):
                if not shapes or self._check(output, target, shapes[0][1]):
                    self._checked |= {several, False}

    def _check(self, output: Any, target: Any, length: int) -> bool:
        """Compare losses; return whether there was one, which there is not without a target that counts."""
        leaves, structure = _pytree.tree_flatten((output, target))
        dims = [1 if 1 in dims_of(x) and x.shape[1] == length else None for x in leaves]
        few = [few_of(x, dim) for x, dim in zip(leaves, dims, strict=True)]
        targets = len(leaves) - len(_pytree.tree_leaves(target))
        few[:targets] = [_unequal(x) for x in few[:targets]]
        whole = [whole_of(x, dim, self._part, self._exchange) for x, dim in zip(few, dims, strict=True)]
        found = self._compare(few, whole, structure, targets)
        for n in range(targets, len(leaves)):
            for value in self._values_in(leaves[n]) if dims[n] else ():
                filled = few[n].clone()
                if self._part.index == 0:
                    filled[::2, 1:] = value
                others = [*few[:n], filled, *few[n + 1 :]]
                joined = whole_of(filled, 1, self._part, self._exchange)
                self._compare(others, [*whole[:n], joined, *whole[n + 1 :]], structure, targets)
        return found

    def _values_in(self, target: Tensor) -> list[float]:
        """Return values that are likely not to count: 0, and the least, the most frequent and the last of each part."""
        if target.is_complex():
            return []
        values = local(target).double() if target.is_floating_point() else local(target).long()
        picks = torch.stack([values.min(), values.flatten().mode().values, values[-1, -1].flatten()[-1]])
        every = self._exchange.start_gather(picks)()
        return sorted({0, *every.flatten().tolist()})

    def _compare(self, few: list[Any], whole: list[Any], structure: Any, outputs: int) -> bool:
        """Compare the loss of whole samples with that of parts; return whether there is one."""
        (expected, counted, grads), (loss, weight, parts) = (
            self._value(x, structure, outputs) for x in (whole, few)
        )
        every = self._exchange.start_gather(torch.stack([loss, weight])[None])()[:, 0]
        divisor = 1.0 if self._weight is None else every[:, 1].sum()
        total = (every[:, 0] * every[:, 1]).nansum() / divisor
        if not bool(expected.isfinite()) or not bool(counted):
            return False
        # Of a policy's loss in its first step, which is the same whatever its outputs are, only the gradient tells.
        differ = [
            self._differs(one, other, weight / divisor) for one, other in zip(grads, parts, strict=True)
        ]
        if any(differ) or bool((total - expected).abs() > 1e-4 * expected.abs().clamp(min=1e-3)):
            raise ConfigError(
                "the loss function gives another value if the tokens of a sample are divided (cp): it may not shift its "
                "targets, use other tokens, or take a mean of each sample before that of all; and what it counts must be "
                "known: the ignore_index and class weights that it has as a module or a partial, or the reduction "
                "(reduction='valid' counts all that are not ignored, penstock.valid_tokens those of a loss that shifts, and "
                "a function returns the weight of a target). Give shifted targets, or such a function; or leave cp at 1"
            )
        return True

    def _differs(self, whole: Tensor, own: Tensor, share: Tensor) -> bool:
        """Compare a gradient of whole samples with that of this part, which has a share of the loss."""
        if whole.shape == own.shape:  # an output without tokens, whose gradients the parts add up
            return False
        one = self._part.cut(whole)
        other = own * share.to(own) if bool(share) else torch.zeros_like(own)
        return bool(((one - other).abs() > 0.01 * one.abs().max()).any())

    def _value(self, leaves: list[Any], structure: Any, outputs: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the loss of some tokens and its weight, as float64, and its gradients by the outputs."""
        trained = [x.detach().requires_grad_() for x in leaves[:outputs] if _trains(x)]
        # Hooks of a stage that recomputes its layers save nothing for a backward.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            copies = iter(trained)
            given = [next(copies).clone() if _trains(x) else x for x in leaves[:outputs]]
            values = _pytree.tree_unflatten([*given, *leaves[outputs:]], structure)
            returned = self._function(*values)
            loss = torch.as_tensor(sum(returned.values()) if isinstance(returned, Mapping) else returned)
        grads = [torch.zeros_like(x) for x in trained]
        if trained and loss.requires_grad:
            grads = [*torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)]
        weight: Any = 1.0 if self._weight is None else self._weight(values[1])
        loss = loss.detach().double().cpu()
        return loss, torch.as_tensor(weight).double().cpu(), [local(x) for x in grads]


def _unequal(output: Any) -> Any:
    """Return the output of a few tokens, varied if all are equal, as of a head of zeros, so that their losses differ."""
    varies = (
        1 not in dims_of(output) or not output.is_floating_point() or bool((output != output[:, :1]).any())
    )
    generator = torch.Generator().manual_seed(0)
    return output if varies else output + 0.05 * torch.rand(output.shape, generator=generator).to(output)


def _same(saved: Tensor) -> Tensor:
    return saved


def _trains(output: Any) -> bool:
    return isinstance(output, Tensor) and output.is_floating_point()
