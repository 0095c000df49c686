"""Random numbers of a layer, drawn from generators that only this layer uses.

All code of a process shares torch's default generators. A layer's draws from them depend on which draws came before, which
other layers share the process, and, in threads, on chance. Within `isolated_rng` every function of torch that draws uses a
generator seeded only by (seed, step, microbatch, layer). Functions that take a generator get it as an argument; the others
are computed from its draws (`stage.rng.random_functions`).

On a CPU a layer within `isolated_rng` gives bit for bit the results that it gives alone in a process after
``torch.manual_seed`` with the same seed.

A layer's random numbers must not depend on the split or on the order in which layers run. So every stream of random
numbers starts from a seed that is computed from its key, the same on every rank.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable, Sequence
from operator import index
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.stage.rng.random_functions import COMPUTED, Replacement


def seed_of(*parts: object) -> int:
    """Return the seed of a key.

    Each part is hashed with its kind and its length before it, so that different keys never give the same bytes.
    """
    data = b""
    for part in parts:
        # `index` refuses a part that is neither text nor a whole number.
        kind, text = ("s", part) if isinstance(part, str) else ("i", str(index(part)))  # type: ignore[arg-type]
        encoded = text.encode()
        data += f"{kind}{len(encoded)}:".encode() + encoded
    return digest_seed(data)


def digest_seed(data: bytes) -> int:
    """Return a seed from 0 to 2**64 - 1: the first 8 bytes, little-endian, of the SHA-256 digest of the data.

    torch's CPU generator uses only the low 32 bits of a seed, its CUDA generator all 64.
    """
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


KeyOf = Callable[[tuple[Any, ...], Sequence[int]], tuple[Any, ...]]
"""Returns the key of what is drawn, from the context's key, (seed, step, microbatch, layer), and a shape."""
_thread = threading.local()


def set_random_keys(key_of: KeyOf | None) -> None:
    """Have this thread's random numbers depend on the shape of what is drawn, too, or no longer."""
    _thread.key_of = key_of


class isolated_rng(TorchFunctionMode):  # noqa: N801 - used as a context manager, like torch's own modes
    """Context in which random draws come from generators of one key, one per device, made at the first draw.

    It may be entered within or around `defer_weight_grads`, in any thread. A new context with the same key gives the same
    draws in the same order, as recompute needs. Calls with an explicit generator and tensors on the meta device are left
    alone.

    Args:
        microbatch: number of the microbatch in the global batch.
    """

    def __init__(
        self, seed: int, step: int, microbatch: int, layer: str, on_draw: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._key = (seed, step, microbatch, layer)
        self._on_draw = on_draw
        self._generators: dict[tuple[torch.device, Hashable], torch.Generator] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replace = _REPLACED.get(func)
        if replace is not None:
            return replace(self, func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    @property
    def drew(self) -> bool:
        """True if there has been a draw."""
        return bool(self._generators)

    def generator(self, device: torch.device, shape: Sequence[int]) -> torch.Generator:
        """Return the generator on a device (with an index, like a tensor's device), made at the first call.

        Args:
            shape: of what is drawn.
        """
        if self._on_draw is not None:
            self._on_draw()
        key_of: KeyOf | None = getattr(_thread, "key_of", None)
        key: tuple[Any, ...] = self._key if key_of is None else key_of(self._key, shape)
        generator = self._generators.get((device, key))
        if generator is None:
            generator = self._generators[device, key] = torch.Generator(device).manual_seed(seed_of(*key))
        return generator


# Functions that take a generator.

_Place = tuple[torch.device, Sequence[int]]
"""Device and shape of what is drawn."""


def _has_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("generator") is not None or any(isinstance(arg, torch.Generator) for arg in args)


def _device_of_new(kwargs: dict[str, Any]) -> torch.device:
    out = kwargs.get("out")
    if out is not None:
        device: torch.device = out.device
        return device
    argument = kwargs.get("device")
    device = torch.get_default_device() if argument is None else torch.device(argument)
    # A new tensor tells the index of the current device, which is part of a generator's key.
    return device if device.type in ("cpu", "meta") else torch.empty(0, device=device).device


def _with_generator(
    mode: isolated_rng, place: _Place, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if place[0].type == "meta" or _has_generator(args, kwargs):
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "generator": mode.generator(*place)})


def _new(mode: isolated_rng, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call torch.rand or its kin, which have no input tensor."""
    # A sequence among the arguments is the shape; otherwise, as in torch.rand(2, 3), all of them are.
    shape = next((x for x in (kwargs.get("size"), *args) if isinstance(x, tuple | list)), args)
    return _with_generator(mode, (_device_of_new(kwargs), shape), func, args, kwargs)


def _from_tensor(mode: isolated_rng, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call Tensor.normal_, torch.bernoulli or their kin; torch.normal may have no tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return _with_generator(mode, (value.device, value.shape), func, args, kwargs)
    return _new(mode, func, args, kwargs)


def _generator_last(mode: isolated_rng, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do `_from_tensor` for functions whose last positional argument may be the generator."""
    return _from_tensor(mode, func, args[:-1] if args[-1:] == (None,) else args, kwargs)


def _rand_like(fill: Callable[..., Tensor]) -> Replacement:
    """Return torch.rand_like or its kin: an empty tensor, then `fill(tensor, *bounds, generator=...)`."""

    def replaced(mode: isolated_rng, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _has_generator(args, kwargs):
            return func(*args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in _BOUNDS}
        requires_grad = options.pop("requires_grad", False)
        empty = torch.empty_like(*args[:1], **options)
        if empty.device.type == "meta":
            return func(*args, **kwargs)
        bounds = [*args[1:], *(kwargs[name] for name in _BOUNDS if kwargs.get(name) is not None)]
        generator = mode.generator(empty.device, empty.shape)
        return fill(empty, *bounds, generator=generator).requires_grad_(requires_grad)

    return replaced


_BOUNDS = ("low", "high", "generator")  # in randint_like's order


def _fill_integers(empty: Tensor, *bounds: Any, generator: torch.Generator) -> Tensor:
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    return empty.random_(int(low), int(high), generator=generator)


# Python functions whose bodies draw.


def _never(*_: Any) -> bool:
    return False


def _run_body(func: Any) -> Replacement:
    """Return a replacement that runs the function's body with the mode on.

    Such a function first checks whether a mode is on and, if so, passes itself to the mode, which is then off for all that
    it calls. Here its body runs in a copy without the check.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(names, _never)}
    body = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__

    def replaced(mode: isolated_rng, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return body(*args, **kwargs)

    return replaced


_REPLACED: dict[Any, Replacement] = {
    **COMPUTED,
    **dict.fromkeys((torch.rand, torch.randn, torch.randint, torch.randperm), _new),
    **dict.fromkeys(
        (
            torch.normal,
            torch.bernoulli,
            torch.multinomial,
            torch.rrelu,
            torch.rrelu_,
            Tensor.bernoulli,
            Tensor.multinomial,
            Tensor.bernoulli_,
            Tensor.uniform_,
            Tensor.normal_,
            Tensor.exponential_,
            Tensor.geometric_,
            Tensor.cauchy_,
            Tensor.log_normal_,
            Tensor.random_,
            nn.init.uniform_,
            nn.init.normal_,
            nn.init.kaiming_uniform_,
        ),
        _from_tensor,
    ),
    **dict.fromkeys(
        (torch.poisson, torch.binomial, torch._standard_gamma, torch._sample_dirichlet), _generator_last
    ),
    torch.rand_like: _rand_like(Tensor.uniform_),
    torch.randn_like: _rand_like(Tensor.normal_),
    torch.randint_like: _rand_like(_fill_integers),
    **{
        func: _run_body(func)
        for func in (
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.alpha_dropout,
            F.feature_alpha_dropout,
            F.rrelu,
            F.gumbel_softmax,
            F.multi_head_attention_forward,
        )
    },
}
