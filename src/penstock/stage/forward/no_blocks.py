"""Reasons why a forward has no loop or call that is known to run its blocks."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from penstock.errors import SplitError
from penstock.stage.forward.iteration import rounds
from penstock.stage.forward.module_uses import Frame, chain_value

_STACKS = nn.TransformerEncoder | nn.TransformerDecoder | nn.Transformer


def no_blocks(frame: Frame, statements: Sequence[ast.stmt], facts: Mapping[str, Any]) -> SplitError:
    """Return the error for a forward without blocks, with the reason if it is a known one.

    Args:
        frame: the forward.
        statements: its statements, without branches that are never taken.
        facts: known values of variables.
    """
    for statement in statements:
        if isinstance(statement, ast.With | ast.If | ast.Try | ast.While):
            for node in ast.walk(statement):
                if isinstance(node, ast.For) and rounds(frame, node.iter, facts):
                    return _nested(frame, statement)
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


def _nested(frame: Frame, statement: ast.stmt) -> SplitError:
    word = type(statement).__name__.lower()
    fix = "run the loop outside of it"
    if isinstance(statement, ast.With):
        fix += ", with the statement in the forward of the block (for autocast, give the Pipeline autocast=torch.bfloat16)"
    return frame.source.refusal(
        statement, f"the loop over its blocks is within {_article(word)} statement", fix
    )


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _reason(frame: Frame, node: ast.AST) -> tuple[str, str] | None:
    match node:
        case ast.Call(ast.Attribute(ast.Call(ast.Name("super")), "forward")):
            return (
                "it calls super().forward, whose statements are in another class",
                "write the whole forward in one class",
            )
        case ast.Call(ast.Attribute() | ast.Subscript() as called):
            known = chain_value(frame, called)
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
