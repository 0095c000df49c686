"""The forward of a model of transformers, in the three parts that the layers of a pipeline run.

The forward is never copied or read. It runs on a *shell* of the model: shallow copies of the modules around the blocks,
with a stub of `forward_stubs` for each block. A stub records the arguments that it is called with and returns its input, so
masks, rotary tables and indices are what the model's own code makes of them. Three runs serve a pipeline:

- the first layer runs the forward on token ids up to the first stub, and returns what that gets;
- a block runs with the arguments that its stub has recorded, in a run up to the last stub;
- the last layer runs the whole forward, where the last stub returns the hidden state of the last block.

The last two have no token ids, but for the last layer of a model that pools, which finds each row's last token by them.
They run on a *probe*, a tensor of NaN in the place of the embedded tokens, and modules with parameters before the blocks
return NaN, too. So no value before the blocks can reach an argument or the logits unseen. Between two stubs the object must
stay the same one, which proves that the forward does nothing there.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from penstock.base.errors import BatchError, ConfigError, PenstockError, SplitError, describe_error
from penstock.huggingface.argument_cache import ArgumentCache, Same
from penstock.huggingface.divided_attention import ArgumentCutter, require_known_attention
from penstock.huggingface.forward_stubs import FORMS, Absent, Call, Rest, Run, Stopped, Stub, nan
from penstock.huggingface.library import package_of
from penstock.huggingface.router_loss import router_loss_of
from penstock.parallel.context.attention import Division, current_division, current_part
from penstock.stage.devices import place_of
from penstock.stage.layers import has_forward_hooks

NAMED = ("attention_mask", "position_ids", "token_type_ids")
"""Named inputs of a step that a model's forward may take."""
IMAGE_INPUTS = ("pixel_values", "image_sizes", "pixel_attention_mask", "image_grid_thw", "mm_token_type_ids")
"""Named inputs about images, which the forward needs before the first block alone."""
GRIDS = "image_grid_thw"
"""The one that says how many of all patches each image has; positions follow from it and the token ids."""


class Reached(NamedTuple):
    """Inputs of a last layer.

    Attributes:
        layer: the last layer; None in a run without parameters, where what the forward returns is NaN.
        named: the named inputs of `NAMED`.
        input_ids: token ids if the model pools.
    """

    layer: nn.Module | None
    hidden: Tensor
    named: Mapping[str, Tensor | None]
    input_ids: Tensor | None


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class OwnForward:
    """The forward of one model, for the threads of several ranks. A deep copy is the same object.

    Args:
        model: the model; on the meta device, it is the pattern of layers that are built elsewhere.
        real: function that returns a module without parameters by its path, on its device.

    Attributes:
        blocks: path of the list of blocks.
        count: number of blocks.
        paths: paths of the blocks.
        parent: module with the list of blocks.
        before, after: paths of modules with parameters that run before the first block, and after the last or never.
        named: names of `NAMED` that the forward takes.
        images: names of `IMAGE_INPUTS` that the forward takes; none if it takes no images.
        first: name of the input that the first layer takes: ``input_ids``, or ``pixel_values`` of a model of images alone.
        has_grids: whether it takes `GRIDS`, so that later stages get the positions from the first.
        parameters: names of parameters of the modules around the blocks themselves, which only images need.
        pools: whether the model has logits of each row, not of each token.
        trains: whether the layers are for a run, where what fails is the batch, and not for a proof (default False).
        divides_images: whether images are divided into microbatches by rows, so that each must have one (default
            True).
        keeps_hidden: whether the last layer returns the hidden state, from which `output` makes what the forward returns
            (default False).
        head: the last layer of this process that has run; None before.
        router_loss: loss of the routers that the forward adds to its own; None for none. With one, layers pass on its sums
            beside the hidden state: (hidden state, tokens sent to each expert, probabilities of each expert).

    Raises:
        SplitError: if the forward does more than call the blocks one after the other; says what.
    """

    def __init__(self, model: Any, real: Callable[[str], nn.Module]) -> None:
        self.model, self._real, self.trains = model, real, False
        self.divides_images, self.keeps_hidden = True, False
        self.head: nn.Module | None = None
        self.blocks = _blocks_of(model)
        self.count = len(model.get_submodule(self.blocks))
        self.parent: nn.Module = model.get_submodule(self.blocks.rpartition(".")[0])
        self.paths = [f"{self.blocks}.{n}" for n in range(self.count)]
        self._cache = ArgumentCache()
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._is_pattern = all(parameter.is_meta for parameter in model.parameters())
        self._around = _around(self.blocks)
        taken = inspect.signature(model.forward).parameters
        self.first = "input_ids" if "input_ids" in taken or "pixel_values" not in taken else "pixel_values"
        self.images = tuple(name for name in IMAGE_INPUTS if name in taken and "pixel_values" in taken)
        if self.first == "pixel_values":
            self.images = ()
        self._require_plain()
        self.parameters = tuple(
            f"{path}.{name}".lstrip(".")
            for path in self._around
            for name, _ in model.get_submodule(path).named_parameters(recurse=False)
        )
        self.router_loss = router_loss_of(model, self.parent)
        anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        self.named = tuple(name for name in NAMED if name in taken)
        constants = {
            "use_cache": False,
            "return_dict": True,
            "output_hidden_states": False,
            "output_attentions": False,
        }
        if self.router_loss is not None:
            constants["output_router_logits"] = False  # the layers compute the loss
        self._constants = {name: value for name, value in constants.items() if anything or name in taken}
        self._form, self.pools = 0, False
        self.before, self.after = self._order()

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnForward:
        """Return self, as copies of a layer share the forward."""
        return self

    @property
    def has_grids(self) -> bool:
        return GRIDS in self.images

    def embed(
        self, layer: nn.Module, input_ids: Tensor, named: Mapping[str, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden state that the forward gives the first block, and positions that it computes by the ids.

        Args:
            layer: module with the modules of `before` by their paths.
            named: also images by the names of `images`.
        """
        if current_division() is not None:
            require_known_attention(self.model.config.get_text_config())
        if self.first != "input_ids" and current_part() is not None:
            raise ConfigError(
                "images are not divided over the tokens of a sample (cp), and this model has no others; leave cp at 1"
            )
        if "position_ids" in self.named and named.get("position_ids") is None and (part := current_part()):
            named = {**named, "position_ids": part.positions(input_ids.shape[1], input_ids.device)[None]}
        run = Run(self.count, self._form, stop=0)
        hidden: Tensor = self._run(
            run, layer, self.before, layer.training, None, **{self.first: input_ids}, **self._given(named)
        )
        return hidden, run.positions

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not annotate it
    def call(self, number: int, hidden: Tensor, named: Mapping[str, Tensor | None]) -> Call:
        """Return the arguments of a block; made once a microbatch, not once a block."""
        given = {name: value for name, value in named.items() if value is not None}
        owner = next(iter(given.values()), None)
        division = current_division()
        described = (hidden.shape, hidden.dtype, hidden.device, division and division.part)
        key = (*described, *((name, Same(value)) for name, value in given.items()))
        with self._lock, torch.inference_mode(False), torch.no_grad():
            calls: list[Call] = self._cache.get(owner, key, lambda: self._calls(hidden, given, division))
        return calls[number]

    def logits(
        self,
        layer: nn.Module,
        hidden: Tensor,
        named: Mapping[str, Tensor | None],
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logits for the hidden state after the last block.

        Args:
            layer: module with the modules of `after` by their paths.
            input_ids: token ids if the model pools; what is embedded is NaN all the same.
        """
        output = self._output(layer, hidden, named, input_ids)
        logits: Tensor = logits_of(output)
        if (self.pools or hasattr(output, "start_logits")) and current_part() is not None:
            raise ConfigError(
                f"{type(self.model).__name__} has logits of each row, which a process with some of its tokens (cp) "
                "cannot compute; leave cp at 1"
            )
        return logits

    def ends(self, reached: Reached) -> None:
        """Keep what a last layer has got, for `output` in the same thread."""
        self._thread.reached = reached
        self.head = self.head if reached.layer is None else reached.layer

    def output(self, call: Mapping[str, Any], forward: Callable[..., Any] | None = None) -> Any:
        """Return what the forward returns for the hidden state that the last layer of this thread has got.

        Args:
            call: arguments of the forward besides those of the stages, such as labels.
            forward: function of a model and these arguments in the place of the model's forward, such as one with the same
                layers and a fused head; None for the model's own.
        """
        reached: Reached = self._thread.reached
        return self._output(reached.layer, reached.hidden, reached.named, reached.input_ids, call, forward)

    def _output(
        self,
        layer: nn.Module | None,
        hidden: Tensor,
        named: Mapping[str, Tensor | None],
        input_ids: Tensor | None,
        call: Mapping[str, Any] | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> Any:
        run = Run(self.count, self._form, stop=None, last=hidden)
        start = self._start(run, _probe(hidden)) if input_ids is None else {"input_ids": input_ids}
        own, training = ((), False) if layer is None else (self.after, layer.training)
        of_call = {name: value for name, value in (call or {}).items() if name not in self._constants}
        given = {**start, **self._given(named), **of_call}
        return self._run(run, layer, own, training, forward, **given)

    def passes_items(self, labels: Tensor) -> bool:
        """Return whether the forward gives its ``loss_function`` the number of targets that it is called with.

        It runs with the model's own modules after the blocks, so it is asked before stages free what they do not need. Of
        those on the meta device it takes copies with any values, since it looks at the call alone.

        Args:
            labels: labels of one row of four tokens.
        """
        given: dict[str, Any] = {}

        def forward(shell: Any, **inputs: Any) -> Any:
            def stop(*_: Any, **kwargs: Any) -> None:
                given.update(kwargs)
                raise Stopped(None)

            shell.__dict__["_loss_function"] = stop
            return type(shell).forward(shell, **inputs)

        width = vision_of(self.model.config.get_text_config()).hidden_size
        hidden = nan((1, 4, width), self.model.dtype, labels.device)
        ids = torch.ones((1, 4), dtype=torch.int64, device=labels.device) if self.pools else None
        devices = [labels.device] if labels.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):  # a head may have dropout
            after = _WithMemory(self.model, labels.device)
            self._output(after, hidden, {}, ids, {"labels": labels, "num_items_in_batch": 1}, forward)
        return "num_items_in_batch" in given

    def hidden_of(self, output: Any) -> Tensor:
        """Return the hidden state in what a block has returned."""
        hidden: Tensor = output[0] if isinstance(output, tuple | list) else output
        return hidden

    def _start(self, run: Run, probe: Tensor) -> dict[str, Tensor]:
        """Return what starts a run without the first input, in which a probe is in the place of what is embedded."""
        if self.first == "input_ids":
            return {"inputs_embeds": probe}
        run.probe = probe
        shape = image_shape(self.model.config)
        return {self.first: nan((len(probe), *shape), probe.dtype, probe.device)}

    def _given(self, named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        return {name: value for name, value in named.items() if value is not None}

    def _calls(self, hidden: Tensor, given: Mapping[str, Tensor], division: Division | None) -> list[Call]:
        """Run the forward on a probe up to the last stub.

        With divided samples it runs on whole ones, since masks and positions follow from all tokens, and the arguments are
        cut to this process's.
        """
        # The arguments must not keep alive the tensors that end their life in the cache.
        copies = {name: value.clone() for name, value in given.items()}
        probe = _probe(hidden)
        if division is not None:
            copies = {
                name: division.whole(value) if value.dim() > 1 else value for name, value in copies.items()
            }
            length = division.part.whole_length(hidden.shape[1])
            probe = probe[:, :1].expand(-1, length, *probe.shape[2:])  # takes no memory of a whole sample
        run = Run(self.count, self._form, stop=self.count - 1)
        reached = self._run(run, None, (), False, None, **self._start(run, probe), **copies)
        if reached.shape != probe.shape:
            raise self._refusal(f"its blocks take {tuple(reached.shape)}, not {tuple(probe.shape)}")
        self._require_known(run, reached)
        if division is None:
            return run.calls
        cut = ArgumentCutter(division, probe.shape[1])
        return [Call(cut(call.args), cut(call.kwargs), call.keyword) for call in run.calls]

    def _require_known(self, run: Run, hidden: Tensor) -> None:
        """Check that arguments follow from shapes, masks and positions alone."""
        seen: set[int] = set()
        for number, call in enumerate(run.calls):
            arguments: dict[Any, Any] = {**dict(enumerate(call.args, 1)), **call.kwargs}
            for name, value in arguments.items():
                for leaf in _leaves(value):
                    if id(leaf) in seen:
                        continue
                    seen.add(id(leaf))
                    if isinstance(leaf, _PLAIN):
                        continue
                    what = f"argument {name} of block {number}"
                    if not isinstance(leaf, Tensor):
                        raise self._refusal(f"{what} has a {type(leaf).__name__}, which stages cannot share")
                    # A profile is made on tensors without values, after the proof.
                    has_values = leaf.is_floating_point() and not isinstance(leaf, FakeTensor)
                    if leaf is hidden or (has_values and bool(leaf.isnan().any())):
                        raise self._refusal(
                            f"{what} is computed from embedded tokens or parameters outside the blocks"
                        )

    def _order(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Find what blocks return, and which modules run before and after them."""
        # One row of four tokens: long enough for a convolution over time, and for more than one position.
        device = place_of(self.model.parameters()) or torch.device("cpu")
        tokens = torch.ones((1, 4), dtype=torch.int64, device=device)
        furthest: tuple[int, SplitError] | None = None
        for form in FORMS:
            run = Run(self.count, form, stop=None)
            self._form = form
            start = {"input_ids": tokens}
            if self.first != "input_ids":
                image_shape(self.model.config)
                width = vision_of(self.model.config).hidden_size
                start = self._start(run, nan((1, 4, width), self.model.dtype, device))
            try:
                with torch.no_grad():
                    output = self._run(run, None, (), False, None, **start)
            except SplitError as error:
                if furthest is None or len(run.calls) > furthest[0]:
                    furthest = len(run.calls), error
                continue
            if len(run.calls) != self.count:
                raise self._refusal(f"its forward calls {len(run.calls)} of {self.count} blocks")
            for call in run.calls:
                if any(
                    leaf in run.rests for leaf in _leaves([call.args, call.kwargs]) if isinstance(leaf, Rest)
                ):
                    raise self._refusal("its blocks take more than the hidden state from the block before")
            if not isinstance(logits := logits_of(output), Tensor):
                raise self._refusal("its forward returns no logits")
            self.pools = logits.dim() == 2 and self.first == "input_ids"
            return self._sides(run)
        assert furthest is not None
        raise furthest[1]

    def _sides(self, run: Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
        places: dict[str, set[int]] = {}
        for path, number in run.modules:
            places.setdefault(path, set()).add(number)
        for path, numbers in places.items():
            if len(numbers) > 1 or not numbers <= {0, self.count}:
                raise self._refusal(f"its forward calls {path} at several places or between blocks")
        every = [path for path, module in self._outside() if next(module.parameters(), None) is not None]
        # A tower of images does not run without them.
        first = ({0}, None) if self.images else ({0},)
        before = tuple(path for path in every if places.get(path) in first)
        return before, tuple(path for path in every if path not in before)

    def _outside(self) -> Iterable[tuple[str, nn.Module]]:
        """Return the outermost modules around the blocks by their paths."""
        for path in self._around:
            parent = self.model.get_submodule(path)
            for name, child in parent.named_children():
                full = f"{path}.{name}" if path else name
                if full not in self._around and full != self.blocks:
                    yield full, child

    def _require_plain(self) -> None:
        for path in (*self._around, *self.paths):
            if "forward" in vars(self.model.get_submodule(path)):
                where = path or type(self.model).__name__
                raise self._refusal(
                    f"the forward of {where} was replaced; change its class or the modules in it"
                )
        for path in self._around:
            module = self.model.get_submodule(path)
            where = path or type(self.model).__name__
            own = [name for name, _ in module.named_parameters(recurse=False)]
            if own and (self._is_pattern or not self.images):
                raise self._refusal(f"{where} has a parameter of its own, {own[0]}, beside its modules")
            owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
            if path and package_of(owner) not in ("transformers", package_of(type(self.model.config))):
                raise self._refusal(
                    f"{where} has the forward of {owner.__qualname__}, which is not the library's, so nothing proves it; "
                    "change the blocks, or register a model class with a config of its own (AutoModelForCausalLM.register)"
                )
            # They would run at the wrong place, or on every stage, with less than the whole model's arguments.
            hooks = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
            if any(hooks) if path else has_forward_hooks(module):
                raise self._refusal(
                    f"{where} has hooks, and no stage runs the whole of it; put them on its blocks or on the modules around"
                )

    def _run(
        self,
        run: Run,
        layer: nn.Module | None,
        own: Sequence[str],
        training: bool,
        forward: Callable[..., Any] | None,
        **given: Any,
    ) -> Any:
        modules: dict[str, Any] = {} if layer is None else {path: layer.get_submodule(path) for path in own}
        if layer is not None and own is self.before:
            modules |= {name: layer.get_parameter(name) for name in self.parameters}
        run.device = next(value.device for value in given.values() if isinstance(value, Tensor))
        shell = self._shell("", run, modules, training)
        if forward is not None:
            shell.__dict__["forward"] = partial(forward, shell)
        try:
            return shell(**given, **self._constants)
        except Stopped as stopped:
            return stopped.hidden
        except PenstockError as error:
            raise self._refusal(str(error)) from error
        except Exception as error:
            if self.trains:
                raise self._of_batch(error, given) from error
            raise self._refusal(
                f"its forward fails on stubs of its blocks: {describe_error(error)}"
            ) from error

    def _of_batch(self, error: Exception, given: Mapping[str, Any]) -> BatchError:
        """Return the error of a batch on which the forward of a model that can be cut fails."""
        hint, ids = "", given.get("input_ids")
        if isinstance(error, IndexError) and ids is not None:
            hint = (
                f". Token ids must be below {self.model.get_input_embeddings().weight.shape[0]:,}, the rows of its token "
                f"table, got some up to {int(ids.max()):,}; rows must be no longer than its positions, got "
                f"{ids.shape[1]:,} tokens"
            )
        return BatchError(f"{type(self.model).__name__} fails on the batch: {describe_error(error)}{hint}")

    def _support(self, path: str, mode: bool | None) -> nn.Module:
        """Return a module without parameters; one with buffers is this thread's own, since some write to theirs.

        Args:
            mode: mode of the module, which its dropout follows; None for its own.
        """
        copies: dict[str, nn.Module] = self._thread.__dict__
        if path not in copies:
            module = self._real(path)
            shared = {id(self.model.config): self.model.config}
            copies[path] = module if next(module.buffers(), None) is None else copy.deepcopy(module, shared)
        return copies[path] if mode is None else _in_mode(copies[path], mode)

    def _shell(self, path: str, run: Run, modules: Mapping[str, Any], training: bool) -> nn.Module:
        module = self.model.get_submodule(path)
        parameters = {
            name: None
            if p is None
            else modules.get(f"{path}.{name}".lstrip("."), nan(p.shape, p.dtype, run.device))
            for name, p in module._parameters.items()
        }
        children: dict[str, nn.Module | None] = {}
        for name, child in module._modules.items():
            full = f"{path}.{name}" if path else name
            if child is None:
                children[name] = child
            elif full == self.blocks:
                stubs = [Stub(block, n, run) for n, block in enumerate(child.children())]
                children[name] = _bare(child, {str(n): stub for n, stub in enumerate(stubs)}, training)
            elif full in self._around:
                children[name] = self._shell(full, run, modules, training)
            elif full in modules:
                children[name] = modules[full]
            elif next(child.parameters(), None) is not None:
                children[name] = Absent(child, full, run)
            else:
                children[name] = self._support(full, training if self._is_pattern or not training else None)
        bare = _bare(module, children, training)
        bare.__dict__["_parameters"] = parameters
        # Of an earlier call with images, by which a run without ids would count positions.
        if "rope_deltas" in vars(bare):
            bare.__dict__["rope_deltas"] = None
        if self.has_grids and module is self.parent:
            bare.__dict__["forward"] = partial(run.observe, partial(type(module).forward, bare))
        return bare

    def _refusal(self, reason: str) -> SplitError:
        name = type(self.model).__name__
        return SplitError(f"{name} cannot be cut: {reason.removeprefix(f'{name} cannot be cut: ')}")


class _WithMemory(nn.Module):
    """The modules of a model, by their names in it, with memory on a device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._model, self._device = [model], device

    def get_submodule(self, target: str) -> nn.Module:
        """Return the model's module, or a copy without its values if it is on the meta device."""
        module = self._model[0].get_submodule(target)
        if not any(p.is_meta for p in module.parameters()):
            return module
        return copy.deepcopy(module).to_empty(device=self._device)


def vision_of(config: Any) -> Any:
    """Return the config with the sizes of a model of images alone."""
    return getattr(config, "vision_config", config)


def image_shape(config: Any) -> tuple[int, int, int]:
    """Return channels, height and width of an image of a model of images alone.

    Raises:
        SplitError: if its config does not say.
    """
    vision = vision_of(config)
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", None)
    if size is None or channels is None or not isinstance(getattr(vision, "hidden_size", None), int):
        raise SplitError(
            f"a model of {type(config).__name__} cannot be cut: it has no image_size, num_channels or hidden_size"
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return channels, height, width


def logits_of(output: Any) -> Any:
    """Return the logits that a forward has returned: of answers, those of starts and ends, (rows, tokens, 2)."""
    if hasattr(output, "start_logits"):
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output.logits if hasattr(output, "logits") else None


def _bare(module: nn.Module, children: Mapping[str, nn.Module | None], training: bool) -> nn.Module:
    """Return a shallow copy of a module with other children."""
    bare = type(module).__new__(type(module))
    bare.__dict__.update(vars(module))
    # Accelerate wraps the whole model's forward when a run begins; what it wraps is the model, not this copy.
    bare.__dict__.pop("forward", None)
    bare.__dict__["_modules"] = dict(children)
    bare.__dict__["training"] = training
    return bare


def _in_mode(module: nn.Module, training: bool) -> nn.Module:
    """Return a module in a mode: itself, or a copy that shares its buffers."""
    if all(part.training == training for part in module.modules()):
        return module
    children = {
        name: child if child is None else _in_mode(child, training) for name, child in module._modules.items()
    }
    return _bare(module, children, training)


def _probe(hidden: Tensor) -> Tensor:
    return nan(hidden.shape, hidden.dtype, hidden.device)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for part in value for leaf in _leaves(part)]
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    return [value]


def _around(path: str) -> tuple[str, ...]:
    """Return the paths of the modules that contain a module, from the outermost on."""
    parts = path.split(".")
    return tuple(".".join(parts[:n]) for n in range(len(parts)))


def _blocks_of(model: Any) -> str:
    """Return the path of the list of blocks: of those nearest to the token table, the one with most parameters."""
    try:
        table = model.get_input_embeddings()
    except NotImplementedError as error:
        raise SplitError(
            f"{type(model).__name__} cannot be cut: it says of no module that it embeds its input"
        ) from error
    at = next((_around(path) for path, module in model.named_modules() if module is table), ())
    lists: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{one}.") for one in lists):
            together = len({*_around(path)} & {*at})
            lists[path] = together, sum(p.numel() for p in module.parameters())
    if not lists:
        raise SplitError(f"{type(model).__name__} cannot be cut: it has no list of blocks")
    return max(lists, key=lambda path: lists[path])
