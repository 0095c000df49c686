"""Layers of a model, run one by one on tensors without memory.

The tensors are fake: they have shapes, dtypes and storages, but no values. Their device is ``cpu:1``, which no real tensor
has, so that caches by device within layers never mix them with real ones. Only if a layer makes tensors on another device
itself, in the backward of a function of its own, is it ``cpu``. Tensors that a layer caches under any other key than the
device would stay fake after the trace. The weights of one layer at a time are built.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from penstock.base.errors import ProfileError, first_line
from penstock.profile.layer_cost import LayerCost
from penstock.profile.op_counter import OpCounter, storage_key
from penstock.stage.compute.runner import LossFunction
from penstock.stage.layers import Layer
from penstock.stage.module import StageModule
from penstock.stage.named import Context, within

_TWO_DEVICES = re.compile("two (different )?devices")  # not every torch has a class of its own for this error
_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_DEVICES = (torch.device("cpu", 1), torch.device("cpu"))


@dataclass(frozen=True)
class Sample:
    """One microbatch: the model's input and everything else that its layers and its loss take."""

    example: Any  # input of the first layer: a tensor, or tensors in tuples, lists and dicts, batch first
    target: Any = None
    loss_fn: LossFunction | None = None  # runs with the last layer; None leaves it out
    named: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    autocast: torch.dtype | None = None

    @property
    def rows(self) -> int:
        """Samples of the microbatch."""
        for leaf in _pytree.tree_leaves(self.example):
            if isinstance(leaf, Tensor) and leaf.dim():
                return leaf.shape[0]
        raise ProfileError(
            f"the example must be a microbatch of tensors, batch first, got {type(self.example).__name__}"
        )

    @property
    def tokens(self) -> int | None:
        """Tokens of a sample, if the example is whole numbers of shape (batch, sequence)."""
        leaves = [leaf for leaf in _pytree.tree_leaves(self.example) if isinstance(leaf, Tensor)]
        whole = len(leaves) >= 1 and leaves[0].dim() == 2 and not leaves[0].is_floating_point()
        return leaves[0].shape[1] if whole else None


@dataclass(frozen=True)
class LayerRun:
    """One layer's run on a microbatch."""

    layer: Layer
    cost: LayerCost  # with the loss, if it is the last layer
    inputs: Any  # value that it took, of fake tensors
    named: Mapping[str, Any]
    key: object  # equal for layers of the same kind
    tied: int  # trained parameters that an earlier layer has, too


def run_layers(layers: Sequence[Layer], sample: Sample, rows: int) -> list[LayerRun]:
    """Run all layers on a microbatch of `rows` samples, each with its backward."""
    apart, plain = _DEVICES
    try:
        return _run_layers(layers, sample, rows, apart)
    except ProfileError as error:
        if not _TWO_DEVICES.search(str(error.__cause__)):
            raise
        return _run_layers(layers, sample, rows, plain)


def _run_layers(layers: Sequence[Layer], sample: Sample, rows: int, device: torch.device) -> list[LayerRun]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given, autocast = sample.rows, sample.autocast

    def fake(value: Any) -> Any:
        def of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            shape = (rows, *leaf.shape[1:]) if leaf.dim() and leaf.shape[0] == given else leaf.shape
            return torch.empty(shape, dtype=leaf.dtype, device=device)

        with mode:
            return _pytree.tree_map(of, value)

    value = fake(sample.example)
    context = Context(dict(fake(dict(sample.named))), {})
    counted: set[int] = set()
    runs: list[LayerRun] = []
    known: dict[object, LayerCost] = {}
    for n, layer in enumerate(layers):
        with _naming(layer):
            module = _fake_module(StageModule([layer], seed=sample.seed), mode, device)
            context = Context(context.named, context.losses, module.gives)
            loss = None
            if n + 1 == len(layers) and sample.loss_fn is not None:
                loss = (sample.loss_fn, fake(sample.target))
            with mode, device:
                run, value = _run_layer(
                    layer, module, value, context, loss=loss, counted=counted, known=known, autocast=autocast
                )
        runs.append(run)
    return runs


def _run_layer(
    layer: Layer,
    module: StageModule,
    value: Any,
    context: Context,
    *,
    loss: tuple[LossFunction, Any] | None,
    counted: set[int],
    known: dict[object, LayerCost],
    autocast: torch.dtype | None,
) -> tuple[LayerRun, Any]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    untrained = [p for p in module.parameters() if not p.requires_grad]
    excluded = {storage_key(t) for t in (*module.parameters(), *module.buffers())}
    named = {name: context.named[name] for name in module.takes[0] if name in context.named}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in excluded and key not in counted:
            saved[key] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = _leaves_of_a_stage(value)
    leaves = [x for x in _pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]
    forward = OpCounter(excluded)
    precision = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    with within(context), precision, saved_tensors_hooks(pack, lambda tensor: tensor), forward:
        output = module.run(inputs, context, 0, 1)
        if loss is not None:
            output = _loss(loss[0](output, loss[1]))
    counted |= saved.keys()
    counted |= {storage_key(x) for x in leaves}
    kept, handed = sum(saved.values()), 0 if loss is not None else _bytes(output)
    described = (_description(module), _shapes(module), _signature(inputs), _signature(named))
    key = (*described, loss is None, (forward.flops, kept, handed))
    # Equal operations leave equal graphs, so only the first of these layers runs its backward.
    same = (key, tuple(forward.operations))
    if same not in known:
        backward, input_half = OpCounter(excluded), OpCounter(excluded)
        roots = [
            x for x in _pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad and x.grad_fn
        ]
        _backward(roots, [*leaves, *parameters], backward)
        _backward(roots, leaves, input_half)
        taken = [x for x in _pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
        weights = backward.without(input_half).works()
        of_weights = sum(work.amount for work in weights if work.unit == "matmul")
        known[same] = LayerCost(
            forward=forward.works(),
            input_grad=input_half.works(),
            weight_grad=weights,
            saved_bytes=kept,
            selective_bytes=kept,
            waiting_bytes=forward.weight_outputs + sum(forward.weight_inputs.values()),
            input_bytes=sum(x.untyped_storage().nbytes() for x in taken),
            output_bytes=handed,
            transient_bytes=max(0, backward.peak_bytes),
            parameters=sum(p.numel() for p in parameters),
            matrix_parameters=sum(p.numel() for p in parameters if p.dim() == 2 and layer.role == "block"),
            frozen_parameters=sum(p.numel() for p in untrained),
            frozen_bytes=sum(p.numel() * p.element_size() for p in untrained),
            model_flops=forward.flops,
            attention_flops=forward.attention_flops,
            frozen_flops=max(0, forward.flops - forward.attention_flops - of_weights) if untrained else 0,
        )
    own = dict(module.layers[0].named_parameters(remove_duplicate=False))
    tied = sum(own[name].numel() for name in layer.tied if own[name].requires_grad)
    return LayerRun(layer, known[same], inputs, named, key, tied), output


def _backward(roots: Sequence[Tensor], of: Sequence[Tensor], counter: OpCounter) -> None:
    if roots and of:
        grads = [torch.ones_like(root) for root in roots]
        # As in a run, which adds it to the sum of the step, a gradient goes as soon as it is complete.
        hooks = [x.register_post_accumulate_grad_hook(_drop_grad) for x in of]
        with counter:
            # The graph runs twice: for the whole backward, and for its first half.
            torch.autograd.backward(roots, grads, retain_graph=True, inputs=of)
        for hook in hooks:
            hook.remove()


def _drop_grad(leaf: Tensor) -> None:
    leaf.grad = None


def _loss(returned: Any) -> Any:
    return sum(returned.values()) if isinstance(returned, Mapping) else returned


def _leaves_of_a_stage(value: Any) -> Any:
    """Return the value with tensors that begin a graph, as in a stage that starts with the layer."""

    def begin(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return _pytree.tree_map(begin, value)


def _fake_module(module: StageModule, mode: FakeTensorMode, device: torch.device) -> StageModule:
    """Return a copy of a module whose tensors have no memory."""
    memo: dict[int, Any] = {}
    with mode:
        for part in module.modules():
            attributes = [x for x in vars(part).values() if isinstance(x, Tensor)]
            for tensor in (*part._parameters.values(), *part._buffers.values(), *attributes):
                if tensor is not None and id(tensor) not in memo:
                    empty = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                    )
                    memo[id(tensor)] = (
                        nn.Parameter(empty, tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else empty
                    )
    # deepcopy takes from the memo what it finds there, and so copies no weights.
    return copy.deepcopy(module, memo)


def _bytes(value: Any) -> int:
    return sum(x.numel() * x.element_size() for x in _pytree.tree_leaves(value) if isinstance(x, Tensor))


def _description(module: StageModule) -> str:
    return "\n".join(f"{type(part).__qualname__} {part.extra_repr()}" for part in module.layers[0].modules())


def _shapes(module: nn.Module) -> object:
    return tuple(
        (tuple(x.shape), x.dtype, x.requires_grad) for x in (*module.parameters(), *module.buffers())
    )


def _signature(value: Any) -> object:
    leaves, structure = _pytree.tree_flatten(value)
    return str(structure), tuple(
        (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else repr(x) for x in leaves
    )


class _Silence(logging.Filter):
    """Filter that drops all records."""

    def filter(self, record: logging.LogRecord) -> bool:
        return False


@contextmanager
def _naming(layer: Layer) -> Iterator[None]:
    """Raise errors of a layer as `ProfileError` with its name, without torch's own log of them."""
    silent = _Silence()  # ranks' threads each have one
    _TORCH_LOG.addFilter(silent)
    try:
        yield
    except ProfileError:
        raise
    except Exception as error:
        raise ProfileError(
            f"layer {layer.name!r} cannot be profiled: it does not run on tensors without values "
            f"({type(error).__name__}: {first_line(error)}). Make its forward depend on shapes alone, or split the model "
            "by hand"
        ) from error
    finally:
        _TORCH_LOG.removeFilter(silent)
