"""The rest of a model whose stages are on several processes: what a process does not own has no values in it.

Its weights would be those from before the training, in memory that nothing needs. On the meta device they take none, and
whatever reads them fails or gives a result on meta.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.stage.layers import Layer, whole_name

Place = tuple[nn.Module, str, Tensor]
"""A module, the name of a parameter or buffer in it, and the tensor."""


def put_on_meta(layers: Sequence[Layer], own: Iterable[nn.Module], given: nn.Module | None) -> list[Tensor]:
    """Put the parameters and buffers of layers on the meta device, except those that modules of this process have.

    They stay the objects that they are, so that everything that refers to them sees it. Attributes that were computed from
    them, as ``torch.nn.utils.prune`` and spectral_norm leave them, are on meta, too.

    Args:
        own: modules of this process: its stages, and the loss function.

    Returns:
        Tensors that others had to replace, without values. While they exist, no other object has their id.
    """
    mine = {id(module): module for top in own for module in top.modules()}
    kept = {id(tensor) for _, _, tensor in _places(mine.values())}
    of_layers = [m for layer in layers if layer.module is not None for m in layer.module.modules()]
    rest = {id(m): m for m in of_layers if id(m) not in mine}
    unowned = {id(t): t for _, _, t in _places(rest.values()) if id(t) not in kept and not t.is_meta}
    memory = {storage for tensor in unowned.values() if (storage := _memory(tensor))}
    for module in rest.values():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and (not value.is_leaf or _memory(value) in memory):
                vars(module)[name] = _empty(value)
    fixed: dict[int, Tensor] = {}
    for key, tensor in unowned.items():
        empty = _empty(tensor)
        try:
            torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]  # not annotated
        except RuntimeError:  # weak references, which nn.LSTM has, and views refer to the object itself
            fixed[key] = empty
    everywhere = [*of_layers, *(() if given is None or not fixed else given.modules())]
    for owner, name, tensor in list(_places(everywhere)):
        if id(tensor) in fixed:
            setattr(owner, name, fixed[id(tensor)])
            tensor.data = tensor.data.new_empty(0)
    return [unowned[key] for key in fixed]


def give_values(layers: Iterable[Layer], values: Mapping[str, Tensor]) -> None:
    """Give buffers on the meta device their values, by their names in the whole model."""
    for layer in layers:
        for inner, buffer in () if layer.module is None else list(layer.module.named_buffers()):
            value = values.get(whole_name(layer.name, inner, parameter=False))
            if buffer.is_meta and value is not None:
                torch.utils.swap_tensors(buffer, value.clone())  # type: ignore[no-untyped-call]  # likewise


def _places(modules: Iterable[nn.Module]) -> Iterator[Place]:
    for module in modules:
        for members in (module._parameters, module._buffers):
            for name, tensor in members.items():
                if tensor is not None:
                    yield module, name, tensor


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none of its own."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain else 0


def _empty(tensor: Tensor) -> Tensor:
    """Return a tensor on meta with the shape, dtype and attributes of another; a parameter if that is one."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        vars(empty).update(vars(tensor))
    return empty
