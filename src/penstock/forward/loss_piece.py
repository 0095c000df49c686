"""Loss that a model's own forward computes, as the ``loss_fn`` of a Pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn

from penstock.base.errors import PenstockError
from penstock.forward.fragments import Flow, Fragment, compiled
from penstock.forward.pieces import trimmed


class OwnLoss:
    """The end of a forward, from the first statement that uses the target."""

    def __init__(self, model: nn.Module, flows: Sequence[Flow], takes: tuple[str, ...], target: str) -> None:
        for flow in flows:
            _require_no_state(model, flow)
        paths = {path for flow in flows for path in (*flow.step.uses.paths, f"{flow.step.frame.path}.")} - {
            "."
        }
        attributes = {a for flow in flows for a in flow.step.uses.attributes}
        self._fragments: list[Fragment] = [compiled(flow) for flow in flows]
        self.module: nn.Module = trimmed(model, "", sorted(paths), attributes)
        self._takes, self._target = takes, target

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss of a microbatch."""
        values = {self._takes[0]: output} if len(self._takes) == 1 else dict(output)
        values[self._target] = target
        for fragment in self._fragments:
            owner = self.module.get_submodule(fragment.path) if fragment.path else self.module
            result = fragment.function(owner, *[values[key] for key in fragment.takes])
            if fragment.returns:
                break
            values.update(zip(fragment.gives, result, strict=True))
        return loss_in(result)


def loss_in(returned: Any) -> Tensor:
    """Return the loss among the values that a forward returns: the scalar, or the value called ``loss``."""
    if isinstance(returned, Mapping) and "loss" in returned:
        returned = returned["loss"]
    if is_dataclass(returned):
        raise PenstockError(
            f"the model's forward returned a {type(returned).__name__}, a dataclass, which has no loss that is known by its "
            "place; return (output, loss), or a dict with the loss as 'loss'"
        )
    parts = returned if isinstance(returned, tuple | list) else [returned]
    scalars = [p for p in parts if isinstance(p, Tensor) and p.dim() == 0 and p.is_floating_point()]
    if len(scalars) != 1:
        raise PenstockError(
            f"the model's forward returned {len(scalars)} scalar tensors, and one must be the loss; return (output, loss), "
            "or give the Pipeline a loss_fn"
        )
    return scalars[0]


def has_state(model: nn.Module, path: str) -> bool:
    """Return whether a name is of a parameter, or of a module with state or random numbers, which a loss would not have."""
    owner, _, last = path.rpartition(".")
    module = model.get_submodule(owner)._modules.get(last)
    return module is None or any(map(_has_state, module.modules()))


def _require_no_state(model: nn.Module, flow: Flow) -> None:
    """Refuse statements whose weights or buffers a loss function would not have."""
    step = flow.step
    for path in sorted(step.uses.paths):
        if has_state(model, path):
            raise step.frame.source.refusal(
                step.statements[0],
                f"self.{path} is used in a statement with the target or after it, which becomes the loss function",
                f"compute what needs self.{path} in a statement of its own before, as `logits = self.{path}(x)`",
            )


def _has_state(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(t is not None for t in tensors) or isinstance(module, nn.Dropout | nn.AlphaDropout)
