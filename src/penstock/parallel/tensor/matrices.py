"""Tensor parallelism: how each matrix of a model is sharded, for torch's ``parallelize_module``.

In attention and feed-forward the first matrices are sharded by columns (whole heads stay together) and the last one by rows,
so that a block communicates twice in a forward (1909.08053, section 3). The token table and the head are sharded by
vocabulary. Sequence parallelism (2205.05198, section 4.2.2) also shards the norms and the values between blocks along the
sequence; it supports only the built-in model.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from penstock.base.errors import BatchError, ConfigError, nearest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Sharding of a family's modules, by regular expressions that must match the last components of a module's name.

    Attributes:
        table, head: the token table and the matrix that computes logits, sharded by vocabulary.
        within_heads: modules that are not sharded, but used on each rank's heads, so that ranks have partial gradients.
        norms, gathered: for sequence parallelism, the norms, and the modules that need the full sequence as input.
        inputs_first: whether matrices other than table and head have shape (in, out), unlike a linear layer's (out, in).
        qkv: layout of query, key and value: separate matrices; or one matrix with the three of each head together, or with
            all queries, then all keys, then all values.
        complete: modules whose parameters this plan must all name; others might see only one rank's part.
        width: for "side by side", the attribute of the matrix's parent with the width of each of the three.
    """

    heads: str
    columns: str
    rows: str
    table: str
    head: str
    within_heads: str = r"(?!)"  # matches nothing
    norms: str = r"(?!)"
    gathered: str = r"(?!)"
    inputs_first: bool = False
    qkv: Literal["apart", "by head", "side by side"] = "apart"
    width: str = ""
    complete: str = r"(?!)"


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
        qkv="by head",
    ),
    "gpt2": TensorPlan(
        heads=r"attn\.c_attn",
        columns=r"mlp\.c_fc",
        rows=r"attn\.c_proj|mlp\.c_proj",
        table=r"wte",
        head=r"lm_head",
        inputs_first=True,
        qkv="side by side",
        width="split_size",
    ),
}  # fmt: skip
"""By family: the built-in model, and Hugging Face's by their config's ``model_type``."""


def tensor_parallel(
    layers: nn.Module | Iterable[tuple[str, nn.Module]],
    mesh: DeviceMesh,
    family: str = "penstock",
    sequence: bool = False,
) -> None:
    """Shard a model's matrices over a mesh, in place; every rank of the mesh calls it, with the same values.

    Args:
        layers: a module, or (name in the whole model, layer) pairs of the layers that a pipeline rank holds.
        mesh: one-dimensional device mesh, as `penstock.parallel.mesh.Mesh.axis` ("tp") returns it.
        family: key of the model's plan in `PLANS` (default "penstock", the built-in model).
        sequence: whether to use sequence parallelism, too; sequences must divide over the mesh (default False).

    Raises:
        ConfigError: if the family has no plan, or heads or widths do not divide over the mesh. Nothing is sharded then.
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
    if size > 1 and (
        adapted := next((name for name, module in modules if hasattr(module, "base_layer")), None)
    ):
        raise ConfigError(
            f"{adapted} has an adapter (peft), and tensor parallelism does not shard adapters; leave tp at 1, or merge the "
            "adapters first"
        )
    for name, module in modules:
        _require_divisible(plan, name, module, parents.get(name.rpartition(".")[0]), size)
        _require_planned(plan, name, module)
    if size == 1:
        return
    done: dict[int, nn.Parameter] = {}
    for name, module in modules:
        _apply(plan, name, module, mesh, sequence, done)
        if plan.qkv == "side by side" and _is(plan.heads, name):
            parent = parents[name.rpartition(".")[0]]
            setattr(parent, plan.width, getattr(parent, plan.width) // size)


def plan_of(family: str, sequence: bool = False) -> TensorPlan:
    patterns = None if family in PLANS else library_patterns(family)
    if family not in PLANS and patterns is None:
        raise ConfigError(
            f"there is no plan for tensor parallelism of {family!r}{nearest(family, list(PLANS))}; there is one for "
            f"{', '.join(PLANS)}, and for the families with a base_model_tp_plan in transformers"
        )
    if sequence and family != "penstock":
        raise ConfigError(
            f"sequence parallelism is there for the built-in model, not for {family!r}, whose blocks make their positions "
            "from the length of what they are given; leave it off"
        )
    return PLANS[family] if patterns is None else TensorPlan(**patterns)


def _is(pattern: str, name: str) -> bool:
    return re.search(rf"(^|\.)({pattern})$", name) is not None


def _require_divisible(
    plan: TensorPlan, name: str, module: nn.Module, parent: nn.Module | None, size: int
) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return
    outputs, inputs = (1, 0) if plan.inputs_first else (0, 1)
    axis, what = None, ""
    if _is(plan.heads, name):
        each = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
        if not isinstance(each, int):
            raise ConfigError(f"{name}: its module does not say how wide a head is (head_dim or head_size)")
        heads = weight.shape[outputs] // (each if plan.qkv == "apart" else 3 * each)
        if heads % size:
            raise ConfigError(
                f"{name} has {heads} heads of width {each}, which do not divide over tp = {size}; "
                f"take a tp that divides {heads}"
            )
    elif _is(plan.columns, name):
        axis, what = outputs, "outputs"
    elif _is(f"{plan.table}|{plan.head}", name):
        axis, what = 0, "words of vocabulary"
    elif _is(plan.rows, name):
        axis, what = inputs, "inputs"
    if axis is not None and weight.shape[axis] % size:
        raise ConfigError(
            f"{name} has {weight.shape[axis]} {what}, which do not divide over tp = {size}; "
            f"take a tp that divides {weight.shape[axis]}"
        )


def _require_planned(plan: TensorPlan, name: str, module: nn.Module) -> None:
    if any(True for _ in module.parameters(recurse=False)):
        parts = name.split(".")
        inside = any(_is(plan.complete, ".".join(parts[: n + 1])) for n in range(len(parts)))
        if inside and not _is(f"{plan.heads}|{plan.columns}|{plan.rows}|{plan.within_heads}", name):
            raise ConfigError(
                f"{name} has parameters that the plan of transformers for tensor parallelism does not name, so their "
                "gradients would be of one rank's part; leave tp at 1"
            )


def _apply(
    plan: TensorPlan,
    name: str,
    module: nn.Module,
    mesh: DeviceMesh,
    sequence: bool,
    done: dict[int, nn.Parameter],
) -> None:
    if _is(plan.within_heads, name):
        for parameter in module.parameters():
            parameter.register_hook(_AddUp(mesh.get_group()))
    shard = _by_columns_and_rows(plan, name) if plan.inputs_first else None
    shard = shard or _by_style(plan, name, sequence)
    if shard is None:
        return
    before = dict(module.named_parameters(recurse=False))
    shard(module, mesh)
    for key, parameter in before.items():
        # A parameter that two modules share must remain one parameter.
        now = done.setdefault(id(parameter), getattr(module, key))
        module.register_parameter(key, now)
    if _is(plan.table, name) and sequence:
        module.register_forward_pre_hook(_RequireSequence(mesh.size()))
    if before:
        module.register_forward_hook(_arrived)


def _by_columns_and_rows(plan: TensorPlan, name: str) -> Callable[[nn.Module, DeviceMesh], object] | None:
    """Return the function that shards a matrix of shape (in, out); None for other modules."""
    if _is(plan.heads, name) and plan.qkv == "side by side":
        return partial(shard_side_by_side, parts=3)
    if _is(f"{plan.heads}|{plan.columns}", name):
        return shard_columns
    return shard_rows if _is(plan.rows, name) else None


def _by_style(
    plan: TensorPlan, name: str, sequence: bool
) -> Callable[[nn.Module, DeviceMesh], object] | None:
    """Return the function that shards a module by a style of torch; None for a module without one."""
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
    return None if style is None else partial(parallelize_module, parallelize_plan=style)


class _AddUp:
    """Hook that sums the partial gradients of a parameter, one from the heads of each rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total, group=self.group)
        return total


def sums_gradients(hook: object) -> bool:
    """Return whether a parameter's hook is one of `tensor_parallel`, which only sums gradients over ranks."""
    return isinstance(hook, _AddUp)


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
    """Wait for an output that torch leaves in progress, so that it is a plain tensor, which another stage can take."""
    # Torch does not annotate it.
    return _Arrive.apply(output) if hasattr(output, "trigger_wait") else output  # type: ignore[no-untyped-call]


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Any) -> Tensor:
        tensor: Tensor = output.trigger_wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# torch's styles support nn.Linear and nn.Embedding. The functions below shard layers with a weight of shape (in, out) in the
# same ways, such as Conv1D of Hugging Face's GPT-2.


def shard_columns(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module by columns: each rank computes its slice of the outputs from the full inputs."""
    from torch.distributed.tensor import Shard

    _distribute(module, mesh, {"weight": Shard(1), "bias": Shard(0)}, Shard(-1))


def shard_rows(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a module by rows: each rank takes its slice of the inputs; outputs are summed over the ranks."""
    from torch.distributed.tensor import Replicate, Shard

    _distribute(module, mesh, {"weight": Shard(0), "bias": Replicate()}, Replicate())


def shard_side_by_side(module: nn.Module, mesh: DeviceMesh, parts: int) -> None:
    """Shard each of `parts` matrices that lie side by side by columns: of query, key and value each rank has its heads'.

    The parameter has torch's strided placement, so that its full tensor is exactly the matrix of one process.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    weight, bias = (_StridedShard(dim, split_factor=parts) for dim in (1, 0))
    _distribute(module, mesh, {"weight": weight, "bias": bias}, Shard(-1))
    module.forward = partial(_forward, module)


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Any], outputs: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    def shard_parameters(_: str, owner: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(owner.named_parameters(recurse=False)):
            tensor = distribute_tensor(parameter, mesh, [placements[key]])
            owner.register_parameter(key, nn.Parameter(tensor, requires_grad=parameter.requires_grad))

    inputs = Shard(-1) if placements["weight"].is_shard(0) else Replicate()

    def prepare_input(_: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return (DTensor.from_local(args[0], mesh, [inputs], run_check=False),)

    def prepare_output(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[outputs]).to_local()

    distribute_module(module, mesh, shard_parameters, prepare_input, prepare_output)


def _forward(module: nn.Module, x: Any) -> Any:
    """Multiply by this rank's columns of all parts, which for the product are one matrix sharded by columns."""
    from torch.distributed.tensor import DTensor, Shard

    def side_by_side(parameter: Any, dim: int) -> Tensor:
        return DTensor.from_local(parameter.to_local(), x.device_mesh, [Shard(dim)], run_check=False)

    flat = x.view(-1, x.size(-1))
    product = torch.addmm(side_by_side(module.bias, 0), flat, side_by_side(module.weight, 1))
    return product.view(*x.shape[:-1], product.shape[-1])


_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
_HEADS = re.compile(r".*\.[qkv]_proj")
_ATTENTION = re.compile(r".*(attn|attention).*")


def library_patterns(family: str) -> dict[str, Any] | None:
    """Return the arguments of a `TensorPlan` for a family without a plan of ours; None if transformers has none either.

    A config's ``base_model_tp_plan`` names the matrices of a block and how each is sharded. It does not name modules that
    are computed from a rank's part without being sharded, so all parameters except the named matrices are checked.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import CONFIG_MAPPING

    plan = CONFIG_MAPPING[family].base_model_tp_plan if family in CONFIG_MAPPING else None
    if not plan:
        return None
    if unknown := sorted({*plan.values()} - _STYLES):
        raise ConfigError(
            f"there is no plan for tensor parallelism of {family!r}: transformers' plan uses {', '.join(unknown)}; "
            f"supported are {', '.join(sorted(_STYLES))}; leave tp at 1"
        )
    names = {style: [n.rpartition("*.")[2] for n, s in plan.items() if s == style] for style in _STYLES}
    heads = [name for name in names["colwise"] if _HEADS.fullmatch(name)]
    columns = [name for name in names["colwise"] if name not in heads]
    if fused := [name for name in columns if _ATTENTION.fullmatch(name)]:
        raise ConfigError(
            f"there is no plan for tensor parallelism of {family!r}: in {', '.join(fused)} a head may end anywhere; "
            "leave tp at 1"
        )
    embeddings = (
        n
        for n, (inputs, _) in (CONFIG_MAPPING[family].base_model_pp_plan or {}).items()
        if "input_ids" in inputs
    )
    return {
        "heads": _any_of(heads),
        "columns": _any_of(columns),
        "rows": _any_of(names["rowwise"]),
        "table": _any_of([next(embeddings, "embed_tokens")]),
        "head": "lm_head",
        "within_heads": _any_of(names["replicated_with_grad_allreduce"]),
        "complete": _any_of(sorted({name.rpartition(".")[0] for name in (*heads, *columns, *names["rowwise"])})),
    }  # fmt: skip


def _any_of(names: list[str]) -> str:
    return "|".join(map(re.escape, names)) or r"(?!)"
