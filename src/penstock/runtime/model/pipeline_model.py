"""The model of a pipeline as users know it from ``nn.Module``: parameters, state and modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor, nn

from penstock.base.errors import ConfigError
from penstock.forward.loss_reach import modules_called
from penstock.parallel.dtensor import full_tensor
from penstock.runtime.engine import Engine
from penstock.runtime.weights.parameters import LocalParameters
from penstock.runtime.workers.world import World
from penstock.stage.layers import Layer, require_weights, whole_name
from penstock.stage.module import StageModule

Place = tuple[nn.Module, str, Tensor]
"""A module, the name of a parameter or buffer in it, and the tensor."""


class PipelineModel:
    """Parameters, state and modes of the stages of one process.

    Args:
        given: the module that the user gave; None if it was a list of layers.
    """

    def __init__(
        self,
        parameters: LocalParameters,
        weights: Engine,
        given: nn.Module | None = None,
        world: World | None = None,
        others: Sequence[nn.Module] = (),
    ) -> None:
        self._parameters, self._weights = parameters, weights
        self._given, self._world = given, world
        self._emptied = (
            []
            if world is None
            else put_on_meta(parameters.layers, [*weights.stage_modules(), *others], given)
        )

    def wait(self) -> None:
        """Wait until the weights are final: with ``zero="overlap"`` they may still be arriving."""
        self._weights.wait_for_parameters(whole=False)

    def gather_weights(self) -> None:
        """Have all weights of this process's stages in memory, until the next step or update.

        Only with ``ParallelOptions(shard="weights")`` are they elsewhere: their parameters then hold NaN between steps. All
        ranks call this together, or `state_dict`, `full_state_dict` and `load_state_dict`, which do so.
        """
        self._weights.wait_for_parameters(whole=True)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (name in the whole model, parameter) pairs in model order; in processes, of this rank's stages."""
        self.wait()
        return self._parameters.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that this process holds; in threads, all of the model's."""
        for _, parameter in self.named_parameters():
            yield parameter

    def rank_parameters(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs that one of the `local_ranks` updates; exactly one rank updates each parameter."""
        self.wait()
        return self._parameters.of_rank(rank)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers by their names in the whole model; in processes, of this rank's stages.

        The tensors are those that train, not copies. A tied weight has the first of its names alone.
        """
        self.gather_weights()
        with self._weights.naming("pipe.state_dict()"):
            return self._parameters.state_dict()

    def sharded_state(self) -> dict[str, Any]:
        """Return `state_dict` with sharded tensors as they are, for what makes them whole one at a time."""
        self.gather_weights()
        return self._parameters.sharded_state()

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """Return all parameters and persistent buffers of the whole model, as ``model.load_state_dict`` takes them.

        Names and their order are those of the model that was given; a tied weight has all its names. Tensors are copies on
        the CPU, in the dtype that trains; names of one tied weight have one copy. In processes all ranks call this
        together, before the pipeline is closed. What a process does not own of the model is on the meta device there. This
        gives it back, and buffers that are in no state (``persistent=False``) get their values at once::

            state = pipe.full_state_dict()
            pipe.close()
            model.load_state_dict(state, assign=True)

        Args:
            rank0_only: whether to return an empty dictionary on all processes but the run's first (default False).

        Raises:
            CallOrderError: if another rank makes another call, as where this one is within ``if pipe.rank == 0:``.
            PenstockError: if another rank failed, or the pipeline is closed and other processes have a part of the model.
        """
        keeps = self._keeps(rank0_only)
        with self.calling("pipe.full_state_dict()"):
            self.gather_weights()
            state = gather_state(self._parameters.own_state(), self._world, keeps)
            if self._world is not None:
                not_in_it = self._parameters.non_persistent_buffers()
                give_values(self._parameters.layers, gather_state(not_in_it, self._world, keeps))
        return self._parameters.with_all_names(state, self._given) if keeps else {}

    def named_weights(self, rank0_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of all parameters and persistent buffers of the whole model, one tensor at a time.

        For what loads weights one by one, such as an inference engine. Names are those of `full_state_dict`, and a tied
        weight has the first of its names alone. Matrices are whole with tensor parallelism. Tensors are in the dtype that
        trains, on its device, and only for reading: clone what is kept, since some of them are those that train.

        In processes all ranks call this together and go through it; each tensor is broadcast from the rank that has it, and
        a process holds no other besides its own stages. A rank that breaks off receives the rest, and drops it. What is
        done with one must take less than `timeout`.

        Args:
            rank0_only: whether all processes but the run's first get nothing (default False). They exhaust it, too.

        Raises:
            CallOrderError: if another rank makes another call.
            PenstockError: if another rank failed.
        """
        keeps = self._keeps(rank0_only)
        with self.calling("pipe.named_weights()"):
            self.gather_weights()
            values = each_value(self._parameters.own_state(), self._world)
            try:
                for name, value in values:
                    if keeps and isinstance(value, Tensor):
                        yield name, value
            except GeneratorExit:
                for _ in values:  # or the other ranks would wait for this one
                    pass

    def _keeps(self, rank0_only: bool) -> bool:
        return not rank0_only or self.is_main

    @property
    def is_main(self) -> bool:
        """True on the process that prints and writes for all: rank 0 of the first replica, or the one process of the run."""
        return self._world is None or (self._world.is_first and self._world.rank == 0)

    @property
    def tied_names(self) -> dict[str, str]:
        """Names of tied weights in the model, with the name under which `state_dict` has each."""
        return self._parameters.tied_names

    def unsplit(self) -> nn.Module:
        """Close the pipeline, and return the model that was given, with its weights up to date; its ranks must be threads.

        Raises:
            ConfigError: if the ranks are processes, or the model was given as a list of layers.
        """
        if self._world is not None:
            raise ConfigError(
                "unsplit() needs all stages in this process, and they are in several; write, on every rank, state = "
                "pipe.full_state_dict(), pipe.close(), and model.load_state_dict(state, assign=True)"
            )
        if self._given is None:
            raise ConfigError(
                "unsplit() returns the module that was given, but the model was a list of layers; its weights are in "
                "pipe.full_state_dict()"
            )
        self.gather_weights()
        self.close()
        self._parameters.give_buffers_to(self._given)
        return self._given

    def close(self) -> None:
        """End what the pipeline has started; defined by `Pipeline`."""

    def calling(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a call that all ranks make together; defined by `Pipeline`."""
        return nullcontext()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load parameters and buffers from a state by whole-model name; entries of stages held elsewhere are left alone.

        Raises:
            ConfigError: if an entry is missing, misshapen or of no layer; then nothing is loaded.
        """
        self.gather_weights()
        self._parameters.load_state_dict(state)
        self._weights.take_written_parameters()

    def zero_grad(self) -> None:
        """Set the gradients of this process's parameters to None."""
        for _, parameter in self._parameters.named_parameters():
            parameter.grad = None
        self._weights.drop_gradients()

    def stage_modules(self) -> list[StageModule]:
        """Return the modules of all stages that run in this process, copies included."""
        return self._weights.stage_modules()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the stages and of the model that was given, as ``nn.Module.train`` does."""
        for module in (*self.stage_modules(), *([] if self._given is None else [self._given])):
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode, as ``nn.Module.eval`` does."""
        return self.train(False)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copies and pickles, whose ranks would have no threads and no connections."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, since its ranks run here; keep full_state_dict(), or "
            "copy the model and build another one"
        )


@contextmanager
def evaluating(modules: Sequence[nn.Module], loss_fn: object) -> Iterator[None]:
    """Return a context in which modules and all within them are in evaluation mode."""
    modes = [
        (inner, inner.training)
        for module in dict.fromkeys((*modules, *modules_called(loss_fn)))
        for inner in module.modules()
    ]
    # A module may do more than keep the mode in a train of its own, such as merging weights.
    own = [(inner, mode) for inner, mode in modes if type(inner).train is not nn.Module.train]
    for inner, _ in own:
        inner.train(False)
    for inner, _ in modes:
        inner.training = False
    try:
        yield
    finally:
        for inner, mode in own:
            inner.train(mode)
        for inner, mode in modes:
            inner.training = mode


def each_value(own: Mapping[str, Any], world: World | None) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the states of all ranks, rank by rank, with whole tensors; every rank exhausts it."""
    if world is None:
        yield from ((n, v.detach() if isinstance(v, Tensor) else v) for n, v in own.items())
        return
    device = next((v.device for v in own.values() if isinstance(v, Tensor)), torch.device("cpu"))
    reports = world.gather((device.type, [_described(name, value) for name, value in own.items()]))
    if any(kind == "cpu" for kind, _ in reports):
        device = torch.device("cpu")
    for rank, (_, described) in enumerate(reports):
        for name, value, shape, dtype in described:
            if dtype is None:
                yield name, value
                continue
            if rank == world.rank:
                tensor = full_tensor(own[name]).detach()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            world.broadcast(_bytes_of(tensor.to(device)), rank)
            yield name, tensor
            del tensor  # the next one is not made beside it


def _described(name: str, value: object) -> tuple[str, object, tuple[int, ...], str | None]:
    """Return (name, None, shape, dtype) of a tensor, or (name, value, (), None) of another value."""
    if isinstance(value, Tensor):
        return name, None, tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return name, value, (), None


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in its own memory if it is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def gather_state(own: Mapping[str, Any], world: World | None, keeps: bool) -> dict[str, Any]:
    """Return copies on the CPU of the states of all ranks; empty unless kept; every rank calls it."""
    return {
        name: value.to("cpu", copy=name in own) if isinstance(value, Tensor) else value
        for name, value in each_value(own, world)
        if keeps
    }


def put_on_meta(layers: Sequence[Layer], own: Iterable[nn.Module], given: nn.Module | None) -> list[Tensor]:
    """Put the parameters and buffers of layers on the meta device, except those that modules of this process have.

    Their weights would be the ones from before the training, in memory that nothing needs. On meta they take none, and
    whatever reads them fails or gives a result on meta. They stay the objects that they are, so that everything that refers
    to them sees it. Attributes that were computed from
    them, as ``torch.nn.utils.prune`` and spectral_norm leave them, are on meta, too.

    Returns:
        Tensors that had to be replaced by new ones, now without values. While they exist, no other object has their id.
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
    if given is not None and unowned and require_weights not in given._forward_pre_hooks.values():
        given.register_forward_pre_hook(require_weights)
    fixed: dict[int, Tensor] = {}
    for key, tensor in unowned.items():
        empty = _empty(tensor)
        try:
            torch.utils.swap_tensors(tensor, empty)
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
                torch.utils.swap_tensors(buffer, value.clone())


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
