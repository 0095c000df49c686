"""A case run by plain PyTorch: the unsplit model, its gradients accumulated microbatch by microbatch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from penstock.forward.loss_piece import loss_in
from penstock.stage.named import Context, names_taken, set_context
from tests.zoo.case import Case
from tests.zoo.habits import HABITS
from tests.zoo.record import copied, dense
from tests.zoo.subject import (
    DEVICE,
    drawing,
    layer_names,
    loss_of,
    make_batch,
    make_layers,
    make_optimizer,
    own_model,
    shares,
)


class Plain:
    """The unsplit model in training; what `tests.zoo.habits.Trainee` asks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.layers = make_layers(case)
        model = own_model(case, self.layers)
        self.given = self.layers if model is None else [model]
        self.names = layer_names(case, len(self.layers)) if model is None else [""]
        self.criterion = loss_of(case, model)
        self.evaluated: Tensor | None = None
        self.base = 0  # microbatches of the update before this call's
        self.where = whole_names(self.names, self.given)
        make, options = make_optimizer(case)
        self.optimizer = make(list(self.parameters().values()) or [nn.Parameter(torch.zeros(1))], **options)

    def parameters(self) -> dict[str, nn.Parameter]:
        """By name in the whole model, each once, under the first of its names."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, layer in zip(self.names, self.given, strict=True):
            for inner, parameter in layer.named_parameters():
                found.setdefault(id(parameter), (whole(name, inner), parameter))
        return dict(found.values())

    def owners(self) -> dict[str, nn.Module]:
        """Names of persistent buffers in the whole model → the module that has them; each buffer once."""
        found: dict[str, nn.Module] = {}
        seen: set[int] = set()
        for name, layer in zip(self.names, self.given, strict=True):
            state = layer.state_dict()
            for prefix, module in layer.named_modules():
                for own in module._buffers if id(module) not in seen else ():
                    inner = f"{prefix}.{own}" if prefix else own
                    if inner in state:
                        found[whole(name, inner)] = module
                seen.add(id(module))
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers by name in the whole model."""
        return {
            name: copied(module.get_buffer(name.rpartition(".")[2])) for name, module in self.owners().items()
        }

    def train(self, mode: bool) -> None:
        for module in self.given:
            module.train(mode)

    def reload(self) -> None:
        """Nothing: what it has is what it has."""

    def evaluate(self, step: int) -> None:
        criterion = [self.criterion] if isinstance(self.criterion, nn.Module) else []
        modes = [(m, m.training) for module in (*self.given, *criterion) for m in module.modules()]
        for module, _ in modes:
            module.training = False
        try:
            with torch.no_grad():
                parts = make_batch(self.case, step).parts
                found = [self.loss(self.given, part, step, n).detach() for n, part in enumerate(parts)]
            self.evaluated = torch.stack(found)
        finally:  # other cases have the same criterion
            for module, mode in modes:
                module.training = mode

    def loss(self, layers: list[nn.Module], part: tuple[Tensor, Tensor], step: int, number: int) -> Tensor:
        """Forward of a microbatch, with the random numbers that each layer's name gives it."""
        gives = frozenset(
            name for layer in layers for m in layer.modules() for name in getattr(m, "gives", ())
        )
        inputs = make_batch(self.case, step).inputs_of_parts[number] if self.case.own is not None else {}
        context = Context(dict(inputs), {}, gives, microbatch=self.base + number)
        value, target = part[0].clone(), part[1]
        before = set_context(context)
        try:
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16) if self.case.autocast else nullcontext():
                for name, layer in zip(self.names, layers, strict=True):
                    named = context.named
                    targets = () if self.criterion is not None else (target,)
                    with drawing(self.case.seed, step, number, name):
                        value = layer(
                            value, *targets, **{k: named[k] for k in names_taken(layer) if k in named}
                        )
                found = loss_in(value) if self.criterion is None else self.criterion(value, target)
            parts = dict(found) if isinstance(found, Mapping) else {"loss": found}
            for name, loss in context.losses.items():
                parts[name] = loss
            return sum(list(parts.values())[1:], next(iter(parts.values())))
        finally:
            set_context(before)

    def begin(self, number: int) -> None:
        """What comes before a step."""
        self.evaluated = None
        if self.case.own is not None:
            self.case.own.change(number, self.given[0])
        HABITS[self.case.habit].before(number, self)

    def accumulate(self, number: int) -> list[Tensor]:
        """Forward and backward of a batch's microbatches, in order."""
        losses = []
        parts = make_batch(self.case, number).parts
        for n, (part, (factor, divisor)) in enumerate(zip(parts, shares(self.case, parts), strict=True)):
            loss = self.loss(self.given, part, number, n)
            losses.append(loss.detach())
            self.backward(loss, factor, divisor)
        return losses

    def backward(self, loss: Tensor, factor: float, divisor: int) -> None:
        """The backward of a microbatch's share; one that does not count has none, nor has a model that is frozen."""
        if factor == 0 or not any(p.requires_grad for p in self.parameters().values()):
            return
        if divisor != 1:
            loss = loss / divisor
        (loss * factor if factor != 1.0 else loss).backward()

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: copied(p.grad) for name, p in self.parameters().items()}

    def end(self, number: int) -> None:
        """Clip and update, if the step's number says so."""
        case, parameters = self.case, list(self.parameters().values())
        if (number + 1) % case.accumulate:
            return
        if case.wrapped and case.accumulate > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(case.accumulate)
        if case.clip:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        self.optimizer.step()
        if case.wrapped or HABITS[case.habit].zero != "never":
            self.optimizer.zero_grad(set_to_none=case.wrapped or HABITS[case.habit].zero == "none")

    def weights(self) -> dict[str, Tensor]:
        return {name: copied(p) for name, p in self.parameters().items()}


def whole(name: str, inner: str) -> str:
    """A layer's parameter or buffer by its name in the whole model."""
    return f"{name}.{inner}" if name else inner


def whole_names(names: list[str], layers: list[nn.Module]) -> dict[str, str]:
    """Every name of every parameter → the first name of the same one."""
    first: dict[int, str] = {}
    found = {}
    for name, layer in zip(names, layers, strict=True):
        for inner, parameter in layer.named_parameters(remove_duplicate=False):
            full = whole(name, inner)
            found[full] = first.setdefault(id(parameter), full)
    return found


class Terms(Plain):
    """Plain PyTorch that looks at the gradients of each microbatch, and of each place of a weight, on their own.

    Their sum in float64 and the sum of their absolute values say how far any order of summation can be from any other.
    It takes a pipeline's gradients after they were compared, so that from then on both have the same weights again.
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.tied: set[str] = set()
        self.clear()

    def clear(self) -> None:
        """Forget the terms, after an update."""
        self.total: dict[str, Tensor] = {}
        self.absolute: dict[str, Tensor] = {}
        self.largest: dict[str, float] = {}
        self.terms: dict[str, int] = {}

    def accumulate(self, number: int) -> list[Tensor]:
        parts, losses = make_batch(self.case, number).parts, []
        apart = self.apart()
        own = [p for layer in apart for p in layer.parameters()]
        for n, (part, (factor, divisor)) in enumerate(zip(parts, shares(self.case, parts), strict=True)):
            for parameter in own:
                parameter.grad = None
            loss = self.loss(apart, part, number, n)
            losses.append(loss.detach())
            self.backward(loss, factor, divisor)
            self.add(apart)
        return losses

    def apart(self) -> list[nn.Module]:
        """The layers, with a copy of its own of every weight that several of them have."""
        holders: dict[int, int] = {}
        for layer in self.given:
            for parameter in layer.parameters():
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
        shared = [any(holders[id(p)] > 1 for p in layer.parameters()) for layer in self.given]
        self.tied = {name for name, p in self.parameters().items() if holders[id(p)] > 1}
        return [copy.deepcopy(m) if alone else m for m, alone in zip(self.given, shared, strict=True)]

    def add(self, layers: list[nn.Module]) -> None:
        """Count the gradients of a microbatch, place by place."""
        for name, layer in zip(self.names, layers, strict=True):
            found = [dense(p.grad) for p in layer.parameters() if p.grad is not None and p.grad.numel()]
            largest = max((grad.abs().max().item() for grad in found), default=0.0)
            for inner, parameter in layer.named_parameters():
                if parameter.grad is None:
                    continue
                first = self.where[whole(name, inner)]
                grad, terms = parameter.grad.detach().to(wide(parameter.dtype)), 1
                absolute = dense(grad).abs()
                if grad.is_sparse and not grad.is_coalesced():
                    # Its rows are added when it is coalesced, with those of other microbatches, in any order.
                    absolute = dense(
                        torch.sparse_coo_tensor(grad._indices(), grad._values().abs(), grad.shape)
                    )
                    terms = int(torch.bincount(grad._indices()[0]).max()) if grad._nnz() else 1
                self.total[first] = self.total.get(first, 0) + dense(grad)
                self.absolute[first] = self.absolute.get(first, 0) + absolute
                self.largest[first] = self.largest.get(first, 0.0) + largest
                self.terms[first] = self.terms.get(first, 0) + terms

    def take(self, gradients: dict[str, Tensor | None], buffers: dict[str, Tensor]) -> None:
        """Gradients and buffers that were found to be as they should."""
        for name, module in self.owners().items():
            setattr(module, name.rpartition(".")[2], buffers[name].clone())
        for name, parameter in self.parameters().items():
            parameter.grad = copied(gradients[name])

    def end(self, number: int) -> None:
        super().end(number)
        if (number + 1) % self.case.accumulate:
            return
        self.clear()
        for name, parameter in self.parameters().items():
            if parameter.grad is not None:  # where nobody drops gradients, what was clipped is added to
                self.total[name] = dense(parameter.grad).to(wide(parameter.dtype), copy=True)
                self.absolute[name], self.terms[name] = self.total[name].abs(), 1
                self.largest[name] = 0.0


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
