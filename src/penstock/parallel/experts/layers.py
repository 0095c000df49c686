"""Expert parallelism: the experts of a layer are divided over processes, and each token travels to its experts and back.

A mixture of experts has a module that computes the experts for the tokens that a router chose for each (Mixtral, 2401.04088;
the names here are those of transformers): its parameters are stacks of the experts' weights, and its forward takes
``hidden_states`` [tokens, width], ``top_k_index`` [tokens, k] and ``top_k_weights`` [tokens, k]. With expert parallelism
each process has an equal share of every stack. It sorts the (token, expert) pairs of its tokens by expert, sends each to the
expert's process, runs the module's own forward on what it got with its share of the weights, and sends the results back
(GShard, 2006.16668). No token is dropped.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.base.errors import ConfigError, PenstockError
from penstock.parallel.dtensor import is_dtensor
from penstock.parallel.experts.exchange import ExpertExchange
from penstock.parallel.opened import opened

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TensorRanks(NamedTuple):
    """The processes that share matrices (tp), which have the same tokens.

    Attributes:
        gather: function that joins the rows of all of them, equally many of each.
    """

    rank: int
    size: int
    gather: Callable[[Tensor], Tensor]


def find_experts(layers: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the modules whose parameters are all stacks of ``num_experts``, called as this module says."""
    for name, layer in layers:
        for inner, module in layer.named_modules():
            if _is_experts(module):
                yield ".".join(part for part in (name, inner) if part), module


def _is_experts(module: nn.Module) -> bool:
    number = getattr(module, "num_experts", None)
    own = list(module.parameters())
    if type(number) is not int or not own or any(p.dim() < 2 or p.shape[0] != number for p in own):
        return False
    takes = [
        p
        for p in inspect.signature(type(module).forward).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return len(takes) == _ARGUMENTS and any(p.dim() == _STACK for p in own)


_ARGUMENTS = 4  # self, hidden_states, top_k_index, top_k_weights
_STACK = 3  # dimensions of a stack of matrices


def divide_experts(
    layers: Iterable[tuple[str, nn.Module]],
    mesh: DeviceMesh,
    exchange: ExpertExchange,
    tensor_ranks: TensorRanks | None,
    weight_of: Callable[[Tensor], Tensor],
) -> list[str]:
    """Divide the experts of layers over processes, in place, and return the names of their modules.

    Args:
        layers: (name in the whole model, layer) pairs of the layers that this process holds.
        mesh: one-dimensional mesh of the processes.
        tensor_ranks: the processes with the same tokens, and each takes a part of them; None if there is only this one.
        weight_of: function that returns this process's part of a stack, in the graph, for a forward.

    Raises:
        ConfigError: if the experts do not divide, or have hooks or adapters. Nothing is divided then.
    """
    found = {id(module): (name, module) for name, module in find_experts(layers)}
    for name, module in found.values():
        _require_divisible(name, module, exchange.size)
    kinds: dict[tuple[Any, ...], tuple[str, nn.Module]] = {}
    for name, module in found.values():
        kinds.setdefault((type(module), *(p.shape for p in module.parameters())), (name, module))
    for name, module in kinds.values():  # one of each kind, since a call reads all weights
        _require_separable(name, module, exchange.size)
    numbers: list[Any] = [module.num_experts for _, module in found.values()]
    calls = [call(name) for name, _ in found.values() for call in (_forward_of, _backward_of)]
    exchange.prepare(calls, max(numbers, default=0) // exchange.size)
    done: dict[Tensor, nn.Parameter] = {}
    for full_name, module in found.values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            # A stack that two modules share stays one.
            share = done[parameter] = done[parameter] if parameter in done else _share(parameter, mesh)
            module.register_parameter(name, share)
        hook = module.register_load_state_dict_pre_hook(_divide_state)
        module.forward = DividedExperts(full_name, module, exchange, tensor_ranks, weight_of, hook)
    return [name for name, _ in found.values()]


def undo_division(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Give modules of `divide_experts` their own forward back; their parameters stay shares."""
    for _, layer in layers:
        for module in layer.modules():
            divided = vars(module).get("forward")
            if isinstance(divided, DividedExperts):
                divided.hook.remove()
                del module.forward


def _require_divisible(name: str, module: nn.Module, size: int) -> None:
    number: Any = module.num_experts
    if number % size:
        raise ConfigError(
            f"{name} has {number} experts, which do not divide over ep = {size}; take an ep that divides {number}"
        )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in hooks) or any(p._backward_hooks for p in module.parameters()):
        raise ConfigError(
            f"{name} or one of its parameters has a hook, which would see one process's share of the experts; remove it, or "
            "leave ep at 1"
        )
    if (
        hasattr(module, "base_layer")
        or "forward" in vars(module)
        or any(map(_has_parameters, module.children()))
    ):
        raise ConfigError(
            f"{name} has an adapter or another forward, which expert parallelism does not divide; leave ep at 1, or merge "
            "the adapters first"
        )


def _require_separable(name: str, module: nn.Module, parts: int) -> None:
    """Require that a forward is the sum of its experts' outputs, by calling it whole and part by part on random rows.

    It is called as in evaluation and as in training. A module that cannot be called in this way, such as one on the meta
    device, is not checked.
    """
    stacks = {n: opened(n, p).detach() for n, p in module.named_parameters(recurse=False)}
    stack = next(p for p in stacks.values() if p.dim() == _STACK)
    # Matrices lie as (out, in), or transposed.
    for width in (stack.shape[2], stack.shape[1]) if not stack.is_meta else ():
        generator = torch.Generator("cpu").manual_seed(0)
        rows = torch.randn(_PROBED, width, generator=generator, device="cpu").to(stack)
        called = [_compare_parts(name, module, stacks, rows, parts, training) for training in (False, True)]
        if any(called):
            return


def _compare_parts(
    name: str, module: nn.Module, stacks: dict[str, Tensor], rows: Tensor, parts: int, training: bool
) -> bool:
    """Compare outputs in one mode, without dropout; return whether the module can be called with such rows."""
    number: Any = module.num_experts
    devices = [rows.device] if rows.is_cuda else []
    generator = torch.Generator("cpu").manual_seed(0)
    chosen = min(2, number)
    drawn = torch.rand(_PROBED, number, generator=generator, device="cpu")
    drawn[:, 0] += 1  # all rows come to one expert, more than a capacity lets it take
    index = drawn.topk(chosen).indices.to(rows.device)
    weights = torch.rand(_PROBED, chosen, generator=generator, device="cpu").to(rows)
    every = rows, index, weights
    # Those of two replicas, which come to an expert together.
    halves = zip(*(x.chunk(2) for x in every), strict=True)
    with torch.no_grad(), torch.random.fork_rng(devices), _WithoutDropout():
        try:
            expected, again, *apart = (
                _with_stacks(module, stacks, number, training=training)(*given)
                for given in (every, every, *halves)
            )
        except Exception:  # other rows than these are expected
            return False
        if not isinstance(expected, Tensor):
            raise ConfigError(
                f"{name} returns a {type(expected).__name__}, and divided experts must return a tensor (tokens, width)"
            )
        if not torch.equal(expected, again) or not expected.isfinite().all():
            return True
        expected = torch.cat(apart)
        total, each = torch.zeros_like(expected), number // parts
        for part in range(parts):
            token, place = torch.where(index // each == part)
            if not len(token):  # which a module never sees in a step
                continue
            own = {n: p.narrow(0, part * each, each) for n, p in stacks.items()}
            call = _with_stacks(module, own, each, training=training)
            local = index[token, place, None] % each
            try:
                total.index_add_(0, token, call(rows[token], local, weights[token, place, None]))
            except Exception as error:
                raise ConfigError(
                    f"{name} cannot be called with a part of its experts: {error}. {_SUM}"
                ) from error
    if (total - expected).abs().max() > _NEAR[rows.dtype.itemsize] * expected.abs().max():
        mode = " in training" if training else ""
        raise ConfigError(f"{name} gives other values{mode} if its experts are divided. {_SUM}")
    return True


class _WithoutDropout(TorchFunctionMode):
    """Mode in which dropout keeps all, since other draws would hide what else a forward does in training."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **{**(kwargs or {}), **({"training": False} if func in _DROPOUT else {})})


_DROPOUT = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_PROBED = 32
"""Rows of the comparison."""
_NEAR = {8: 1e-3, 4: 1e-3, 2: 5e-2, 1: 1.0}
"""By bytes of an element, the difference that another order of sums explains, of the largest value."""
_SUM = (
    "Its forward must return, for each token, the sum of its experts' outputs times top_k_weights, and read nothing by the "
    "expert's number but its parameters: neither buffers, nor the other experts of the token, nor a capacity. Do that "
    "outside of it, or leave ep at 1"
)


def _with_stacks(
    module: nn.Module, stacks: dict[str, Tensor], number: int, training: bool | None = None
) -> Callable[..., Any]:
    """Return a module's own forward with other stacks, of so many experts.

    Args:
        training: mode of a call that leaves buffers as they are; None for the module's own call.
    """
    own = copy.copy(module)
    own.__dict__["_parameters"] = {n: stacks.get(n) for n in module._parameters}
    own.__dict__.pop("forward", None)
    own.__dict__["num_experts"] = number
    if training is not None:
        own.__dict__["_buffers"] = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
        own.__dict__["_modules"] = {
            n: None if m is None else copy.deepcopy(m) for n, m in module._modules.items()
        }
        own.train(training)
    return own.forward


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _share(stack: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return this process's share of a stack, as a DTensor; all processes have the same stack."""
    from torch.distributed.tensor import DTensor, Shard

    each = len(stack) // mesh.size()
    own = stack.detach().narrow(0, mesh.get_local_rank() * each, each).clone()
    whole = stack.detach()
    tensor = DTensor.from_local(
        own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(tensor, requires_grad=stack.requires_grad)


def share_like(stack: Tensor, model: Tensor) -> Tensor:
    """Return this process's share of a whole stack, divided as the parameter `model` is; other tensors as they are."""
    if not is_dtensor(model) or is_dtensor(stack) or stack.shape != model.shape:
        return stack
    return _share(stack, model.device_mesh).detach()


def _divide_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Divide the stacks of a state that a module is about to load."""
    for name, parameter in module.named_parameters(recurse=False):
        if prefix + name in state:
            state[prefix + name] = share_like(state[prefix + name], parameter)


class DividedExperts:
    """The forward of a module whose experts are divided over processes; called as the module's own."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        exchange: ExpertExchange,
        tensor_ranks: TensorRanks | None,
        weight_of: Callable[[Tensor], Tensor],
        hook: torch.utils.hooks.RemovableHandle,
    ) -> None:
        self.hook = hook
        self._name, self._module, self._exchange = name, module, exchange
        self._tensor_ranks, self._weight_of = tensor_ranks, weight_of
        number: Any = module.num_experts
        self._number, self._each = number, number // exchange.size

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; shapes as in this module's text, or with more dimensions."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        index = top_k_index.reshape(-1, top_k_index.shape[-1])
        weights = top_k_weights.reshape(index.shape)
        split = self._tensor_ranks
        if split is not None:
            # Torch does not annotate `apply`.
            rows, index, weights = (_Part.apply(x, split) for x in (rows, index, weights))  # type: ignore[no-untyped-call]
        out = self._run(rows, index, weights)
        if split is not None:
            number = hidden_states.shape[:-1].numel()
            out = _Joined.apply(out, split, number)  # type: ignore[no-untyped-call]
        return out.view(hidden_states.shape)

    def _run(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        exchange, k = self._exchange, index.shape[-1]
        expert, order = torch.sort(index.reshape(-1), stable=True)
        counts = torch.bincount(expert, minlength=self._number)
        if len(counts) > self._number:
            raise PenstockError(
                f"{self._name} got the expert {len(counts) - 1}, and has 0 to {self._number - 1}; give a token that no "
                "expert is to compute a weight of 0"
            )
        # In host memory, where they are needed, and where a wait sees that another process has failed.
        leaving = counts.view(exchange.size, self._each).cpu()
        arriving = exchange.meet(_forward_of(self._name), leaving)
        exchange.count(self._name, arriving.sum(0))
        sent = leaving.sum(1).tolist()
        received = arriving.sum(1).tolist()
        pairs = rows[order // k], weights.reshape(-1, 1)[order]
        there, scores = _AllToAll.apply(exchange, sent, received, None, *pairs)  # type: ignore[no-untyped-call]
        local = torch.arange(self._each, device=rows.device).repeat(exchange.size)
        local = local.repeat_interleave(arriving.reshape(-1).to(rows.device), output_size=sum(received))
        if not len(local):
            # One row of zeros, so that the experts stay in the graph and their gradients are zero.
            there = torch.cat([there, there.new_zeros(1, there.shape[1])])
            scores = torch.cat([scores, scores.new_zeros(1, 1)])
            out = self._own_experts()(there, local.new_zeros(1, 1), scores)[:0]
        else:
            out = self._own_experts()(there, local[:, None], scores)
        (back,) = _AllToAll.apply(exchange, received, sent, _backward_of(self._name), out)  # type: ignore[no-untyped-call]
        unsorted = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        total: Tensor = back[unsorted].view(-1, k, back.shape[-1]).sum(1).to(rows.dtype)
        return total

    def _own_experts(self) -> Callable[..., Tensor]:
        """Return the module's own forward with the experts of this process alone."""
        stacks = {n: self._weight_of(p) for n, p in self._module._parameters.items() if p is not None}
        return _with_stacks(self._module, stacks, self._each)


def _forward_of(name: str) -> str:
    return f"the forward of {name}"


def _backward_of(name: str) -> str:
    return f"the backward of {name}"


class _AllToAll(torch.autograd.Function):
    """Rows to other processes, and their gradients back; `call` is what the backward begins, if it is the first of it."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: ExpertExchange,
        sent: list[int],
        received: list[int],
        call: str | None,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.args = exchange, received, sent, call
        return tuple(exchange.all_to_all(x.contiguous(), sent, received) for x in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange, sent, received, call = ctx.args
        if call is not None:
            exchange.meet(call, torch.zeros(exchange.size, 0, dtype=torch.int64))
        return (
            None,
            None,
            None,
            None,
            *(exchange.all_to_all(grad.contiguous(), sent, received) for grad in grads),
        )


class _Part(torch.autograd.Function):
    """This process's part of rows that all processes of a tensor-parallel group have."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks, ctx.rows = ranks, len(rows)
        each = -(-len(rows) // ranks.size)
        return rows[ranks.rank * each : (ranks.rank + 1) * each]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _joined(grad, ctx.ranks, ctx.rows), None


class _Joined(torch.autograd.Function):
    """Rows of all processes of a tensor-parallel group, which then have the same ones."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: TensorRanks, number: int) -> Tensor:
        ctx.ranks = ranks
        return _joined(rows, ranks, number)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        each = -(-len(grad) // ctx.ranks.size)
        return grad[ctx.ranks.rank * each : (ctx.ranks.rank + 1) * each], None, None


def _joined(rows: Tensor, ranks: TensorRanks, number: int) -> Tensor:
    """Return the first `number` rows of all parts; each part is as long as the first, the last ones maybe shorter."""
    each = -(-number // ranks.size)
    padded = torch.cat([rows, rows.new_zeros(each - len(rows), *rows.shape[1:])])
    return ranks.gather(padded)[:number]
