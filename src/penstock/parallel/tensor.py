"""Tensor parallelism: which matrices of a model are cut how, for torch's ``parallelize_module``.

In attention and feed-forward the first matrices are cut by columns (whole heads stay together) and the last one by rows,
so that a block talks twice in a forward (1909.08053, section 3). The token table and the head are cut by vocabulary.
With sequence parallelism (2205.05198, section 4.2.2) what is between the blocks is cut along the sequence, and so are the
norms; it is here for the built-in model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from penstock.errors import BatchError, ConfigError, nearest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TensorPlan:
    """How a family's modules are cut; each is a regular expression that the whole end of a module's name matches.

    Attributes:
        heads: cut by columns, whole heads together.
        columns, rows: cut by columns, by rows.
        table, head: the token table and the matrix that makes logits, cut by vocabulary.
        within_heads: not cut, but used on a rank's own heads, so that their gradients are in parts.
        norms, gathered: for sequence parallelism, the norms, and the modules before which the sequence is put together.
    """

    heads: str
    columns: str
    rows: str
    table: str
    head: str
    within_heads: str = r"(?!)"
    norms: str = r"(?!)"
    gathered: str = r"(?!)"


_LLAMA = TensorPlan(
    heads=r"self_attn\.[qkv]_proj",
    columns=r"mlp\.(gate|up)_proj",
    rows=r"self_attn\.o_proj|mlp\.down_proj",
    table=r"embed_tokens",
    head=r"lm_head",
    within_heads=r"self_attn\.[qk]_norm",
)

PLANS = {
    "penstock": TensorPlan(
        heads=r"attention\.(query|key|value)",
        columns=r"feed_forward\.(gate|up)",
        rows=r"attention\.output|feed_forward\.down",
        table=r"embedding",
        head=r"head\.output",
        norms=r"attention_norm|feed_forward_norm|head\.norm",
        gathered=r"attention|feed_forward",
    ),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _LLAMA
    ),
    "gpt_neox": TensorPlan(
        heads=r"attention\.query_key_value",
        columns=r"mlp\.dense_h_to_4h",
        rows=r"attention\.dense|mlp\.dense_4h_to_h",
        table=r"embed_in",
        head=r"lm_head",
    ),
}  # fmt: skip
"""By family: the built-in model, and Hugging Face's by their config's ``model_type``."""


def tensor_parallel(
    layers: nn.Module | Iterable[tuple[str, nn.Module]],
    mesh: DeviceMesh,
    family: str = "penstock",
    sequence: bool = False,
) -> None:
    """Cut a model's matrices over a mesh, in place; every rank of the mesh calls it, with the same values.

    Args:
        layers: a module, or (name in the whole model, layer) pairs, as a pipeline rank holds them.
        mesh: one-dimensional; `penstock.parallel.mesh.Mesh.axis` ("tp").
        family: which model it is.
        sequence: also sequence parallelism; sequences must divide over the mesh.

    Raises:
        ConfigError: a family without a plan, or heads or widths that do not divide over the mesh. Nothing is cut then.
    """
    plan = plan_of(family, sequence)
    named = [("", layers)] if isinstance(layers, nn.Module) else list(layers)
    modules = [
        (".".join(part for part in (name, inner) if part), module)
        for name, layer in named
        for inner, module in layer.named_modules()
    ]
    size = mesh.size()
    parents = dict(modules)
    for name, module in modules:
        _require_divisible(plan, name, module, parents.get(name.rpartition(".")[0]), size)
    if size == 1:
        return
    cut: dict[int, nn.Parameter] = {}
    for name, module in modules:
        _apply(plan, name, module, mesh, sequence, cut)


def plan_of(family: str, sequence: bool = False) -> TensorPlan:
    """The plan of a family.

    Raises:
        ConfigError: there is none, or none for sequence parallelism.
    """
    if family == "gpt2":
        raise ConfigError(
            "gpt2 keeps query, key and value side by side in one matrix, which cannot be cut by heads without reordering "
            "it; train it with pipeline and data parallelism (tp = 1)"
        )
    if family not in PLANS:
        raise ConfigError(
            f"there is no plan for tensor parallelism of {family!r}{nearest(family, list(PLANS))}; there is one for "
            f"{', '.join(PLANS)}"
        )
    if sequence and family != "penstock":
        raise ConfigError(
            f"sequence parallelism is there for the built-in model, not for {family!r}, whose blocks make their positions "
            "from the length of what they are given; leave it off"
        )
    return PLANS[family]


def _is(pattern: str, name: str) -> bool:
    return re.search(rf"(^|\.)({pattern})$", name) is not None


def _require_divisible(
    plan: TensorPlan, name: str, module: nn.Module, parent: nn.Module | None, size: int
) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return
    axis, what = None, ""
    if _is(plan.heads, name):
        each = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
        if not isinstance(each, int):
            raise ConfigError(f"{name}: its module does not say how wide a head is (head_dim or head_size)")
        heads = weight.shape[0] // each
        if heads % size:
            raise ConfigError(
                f"{name} has {heads} heads of width {each}, which do not divide over tp = {size}; "
                f"take a tp that divides {heads}"
            )
        axis, what = 0, "rows"
    elif _is(f"{plan.columns}|{plan.table}|{plan.head}", name):
        axis, what = 0, "outputs" if _is(plan.columns, name) else "words of vocabulary"
    elif _is(plan.rows, name):
        axis, what = 1, "inputs"
    if axis is not None and weight.shape[axis] % size:
        raise ConfigError(
            f"{name} has {weight.shape[axis]} {what}, which do not divide over tp = {size}; "
            f"take a tp that divides {weight.shape[axis]}"
        )


def _apply(
    plan: TensorPlan,
    name: str,
    module: nn.Module,
    mesh: DeviceMesh,
    sequence: bool,
    cut: dict[int, nn.Parameter],
) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence else Replicate()
    style: Any = None
    if _is(f"{plan.heads}|{plan.columns}", name):
        style = ColwiseParallel()
    elif _is(plan.rows, name):
        style = RowwiseParallel(output_layouts=between)
    elif _is(plan.table, name):
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    elif _is(plan.head, name):
        style = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    elif sequence and _is(plan.norms, name):
        style = SequenceParallel()
    elif sequence and _is(plan.gathered, name):
        style = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    elif _is(plan.within_heads, name):
        for parameter in module.parameters():
            parameter.register_hook(_AddUp(mesh.get_group()))  # type: ignore[no-untyped-call]
    if style is None:
        return
    before = dict(module.named_parameters(recurse=False))
    parallelize_module(module, mesh, style)
    for key, parameter in before.items():
        # A parameter that two modules share is still one.
        now = cut.setdefault(id(parameter), getattr(module, key))
        module.register_parameter(key, now)
    if _is(plan.table, name) and sequence:
        module.register_forward_pre_hook(_RequireSequence(mesh.size()))
    if before:
        module.register_forward_hook(_arrived)


class _AddUp:
    """A parameter's gradient is the sum of what the ranks' heads give."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=self.group)
        return total


class _RequireSequence:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        length = args[0].shape[1]
        if length % self.size:
            raise BatchError(
                f"a sequence of {length} does not divide over tp = {self.size}, which sequence parallelism needs; "
                f"take a multiple of {self.size}"
            )


def _arrived(module: nn.Module, args: Any, output: Any) -> Any:
    """Outputs are plain tensors, which can be handed to another stage; torch leaves some still under way."""
    return _Arrive.apply(output) if hasattr(output, "trigger_wait") else output  # type: ignore[no-untyped-call]


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Any) -> Tensor:
        tensor: Tensor = output.trigger_wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
