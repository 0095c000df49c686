"""Reasons why a forward has no loop or call that is known to run its blocks."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from penstock.base.errors import SplitError
from penstock.forward.module_uses import Frame, resolve_module

_STACKS = nn.TransformerEncoder | nn.TransformerDecoder | nn.Transformer


def no_blocks(frame: Frame, statements: Sequence[ast.stmt], facts: Mapping[str, Any]) -> SplitError:
    """Return the error for a forward without blocks, with the reason if it is a known one."""
    for statement in statements:
        for node in ast.walk(statement):
            reason = _reason(frame, node)
            if reason is not None:
                return frame.source.refusal(node, *reason)
    return frame.source.refusal(
        frame.source.tree,
        "no loop over modules, such as `for block in self.blocks:`, and no nn.Sequential of blocks is called in it "
        "outside of any if, with or try",
        "put the blocks into an nn.ModuleList, and call them one after another in such a loop",
    )


def _reason(frame: Frame, node: ast.AST) -> tuple[str, str] | None:
    match node:
        case ast.Call(ast.Attribute() | ast.Subscript() as called):
            known = resolve_module(frame, called)
            if known is not None and isinstance(known[0], _STACKS):
                kind = type(known[0]).__name__
                return (
                    f"its blocks are in torch's nn.{kind}, whose forward does more than call them",
                    "hold the blocks in an nn.ModuleList of your own, and call them in a loop",
                )
        case ast.For(_, ast.Call(ast.Name("range"))):
            return (
                "the number of rounds of the loop is not known when the model is split",
                "write `for block in self.blocks:`, or `for n in range(len(self.blocks)):`",
            )
    return None
