"""Frames of forwards and methods that are followed: whose statements they are, and what their arguments are."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from penstock.base.errors import SplitError
from penstock.forward.forward_source import read_source
from penstock.forward.liveness import assigned
from penstock.forward.module_uses import Frame, require_unwritten_defaults, resolve
from penstock.forward.torch_forwards import encoder_forward
from penstock.stage.layers import has_forward_hooks

OWN_HEAD = (
    "for a head of your own, such as a critic's, take AutoModelForTokenClassification (a value of each token) or "
    "AutoModelForSequenceClassification (of each row), put your module into its `score` or `classifier`, and give that "
    "model to the Pipeline with your loss_fn, as docs/fine_tuning.md shows"
)
_PARALLEL = nn.DataParallel, nn.parallel.DistributedDataParallel


def forward_frame(module: nn.Module, path: str = "", prefix: str = "", outer: Frame | None = None) -> Frame:
    kind = type(module)
    extras = {
        "a __call__ of its own": kind.__call__ is not nn.Module.__call__,
        "a forward that is not its class's": "forward" in vars(module),
        "hooks": has_forward_hooks(module),
        "been compiled": hasattr(module, "_orig_mod") or module._compiled_call_impl is not None,
    }
    if has := [name for name, there in extras.items() if there]:
        raise SplitError(
            f"cannot split {kind.__name__}: it has {' and '.join(has)}, which would be lost; give the plain model, and "
            "compile by execution=ExecutionOptions(compile='block')"
        )
    if issubclass(kind, _PARALLEL):
        raise SplitError(
            f"cannot split {kind.__name__}: it makes a model parallel in another way; give the model in it (model.module), "
            "and data parallelism by mesh=MeshShape(pp, dp)"
        )
    forward = encoder_forward if kind is nn.TransformerEncoder else kind.forward
    try:
        frame = method_frame(forward, module, path, prefix, outer)
    except SplitError as error:
        if not any(base.__name__ == "PreTrainedModel" for base in kind.__mro__):
            raise
        raise SplitError(f"cannot split by {kind.__name__}, a model of transformers: {OWN_HEAD}") from error
    arguments = frame.source.tree.args
    if not arguments.args or len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) < 2:
        raise frame.source.refusal(
            frame.source.tree, "it takes no input", "let it take the batch as its first argument"
        )
    return frame


def method_frame(
    function: Callable[..., Any], module: nn.Module, path: str, prefix: str, outer: Frame | None
) -> Frame:
    """Return the frame of a call of a module's method."""
    source = read_source(function, f"{type(module).__name__}.{getattr(function, '__name__', 'forward')}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal | ast.Delete):
            word = type(node).__name__.lower()
            raise source.refusal(node, f"it has a {word} statement", "do without it")
        names = [getattr(node, key, None) for key in ("id", "attr", "arg")]
        if any(isinstance(n, str) and n.startswith("__") and not n.endswith("__") for n in names):
            raise source.refusal(node, "it uses a name that Python mangles (__name)", "use one underscore")
    require_unwritten_defaults(source)
    arguments = source.tree.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    extra = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    names_of = {a.arg for a in (*every, *extra)} | assigned(source.tree.body)
    if not arguments.args:
        raise source.refusal(source.tree, "it takes no self", "let it take self as its first argument")
    decided = {} if outer is None else outer.decided
    return Frame(
        source=source,
        module=module,
        path=path,
        self_name=arguments.args[0].arg,
        names=frozenset(names_of),
        prefix=prefix,
        decided=decided,
    )


def method_called(frame: Frame, call: ast.Call) -> tuple[FunctionType, nn.Module, str] | None:
    """Return the method of the model, or of a module within it, that a call runs: function, module, and the module's name.

    ``super().method`` is the method of the next class which has one. None for any other call.
    """
    match call.func:
        case ast.Attribute(ast.Call(ast.Name("super"), [], []), name) if frame.is_builtin("super"):
            function = frame.source.function
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            order = type(frame.module).__mro__
            after = order[order.index(cells["__class__"].cell_contents) + 1 :]
            owner = next((kind for kind in after if name in vars(kind)), nn.Module)
            member = None if owner is nn.Module else vars(owner)[name]
            if isinstance(member, FunctionType):
                return member, frame.module, frame.path
        case ast.Attribute():
            link = resolve(frame, call.func)
            if link is not None and link.kind == "method" and link.owner is not None:
                return link.value, link.owner, link.path
    return None


def arguments_of(frame: Frame, inner: Frame, call: ast.Call) -> dict[str, ast.expr]:
    """Return the expression of every parameter of a forward or method that a call runs."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        raise frame.source.refusal(call, "it passes on *args or **kwargs", "pass the arguments by name")
    signature = inspect.signature(inner.source.function)
    try:
        bound = signature.bind(None, *call.args, **{str(k.arg): k.value for k in call.keywords}).arguments
    except TypeError as error:
        raise frame.source.refusal(
            call, f"it calls {inner.source.owner} wrongly: {error}", "mend it"
        ) from None
    arguments: dict[str, ast.expr] = {}
    for n, (name, parameter) in enumerate(signature.parameters.items()):
        if n == 0 or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if n and name in bound:
                raise frame.source.refusal(call, f"it passes *{name}", "name the parameters")
            continue
        if name in bound:
            arguments[name] = bound[name]
        elif isinstance(parameter.default, bool | int | float | str | None) or parameter.default == ():
            arguments[name] = ast.copy_location(ast.Constant(parameter.default), call)
        else:
            raise frame.source.refusal(call, f"it leaves {name} to its default", "pass it")
    return arguments
