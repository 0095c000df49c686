"""Choice of the family of a model: a row of the table, or one made from the library's own pipeline plan.

``base_model_pp_plan`` of a config names the embedding, the blocks and the norm. It does not describe the code between
them, such as a factor on the embedded tokens or a loss of a router. So a family without a row is accepted only if the
forwards of its inner model and of its model with head are, statement for statement, those of rows of the table.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from penstock.base.errors import SplitError
from penstock.base.model_variants import VARIANT_KEYS, refused_variant
from penstock.huggingface.families import FAMILIES, HEAD, ModelFamily


def family_of(config: Any) -> ModelFamily:
    """Return the family of a config.

    Raises:
        SplitError: if the family is not in the table and its forward is not that of a row, or if the config is of a variant
            whose layers need more than a hidden state, a padding mask and positions.
    """
    kind = str(getattr(config, "model_type", ""))
    config_class: Any = type(config)
    family = FAMILIES[kind] if kind in FAMILIES else _from_plan(config_class)
    reason = refused_variant({key: getattr(config, key, None) for key in VARIANT_KEYS})
    if reason is not None:
        raise SplitError(reason)
    return family


@cache
def _from_plan(config_class: Any) -> ModelFamily:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    kind = str(getattr(config_class, "model_type", ""))
    names = _names_by_role(getattr(config_class, "base_model_pp_plan", None))
    if names is None or not all(config_class in m for m in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)):
        raise SplitError(
            f"no way to split a model of type {kind!r}; the families are "
            f"{', '.join(FAMILIES)}, and those with a base_model_pp_plan in transformers whose forward is that of one "
            "of these. Any other model can be given as a list of layers"
        )
    inner, with_head = MODEL_MAPPING[config_class], MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    prefix = with_head.base_model_prefix
    row = _row_with_forward(kind, inner, {name: role for role, name in names.items()}, "inner")
    head_row = _row_with_forward(kind, with_head, {prefix: "inner"}, "with head")
    assert row.rotary is not None
    return replace(
        row,
        embedding=f"{prefix}.{names['embedding']}",
        blocks=f"{prefix}.{names['blocks']}",
        norm=f"{prefix}.{names['norm']}",
        rotary=f"{prefix}.{row.rotary.rpartition('.')[2]}",
        dropout=None if row.dropout is None else f"{prefix}.{names['dropout']}",
        capped=head_row.capped,
        stored_head=HEAD,
    )


def _names_by_role(plan: Any) -> dict[str, str] | None:
    """Return the plan's modules by their roles; None if it has not one each."""
    names: dict[str, str] = {}
    for name, (inputs, _) in (plan or {}).items():
        if "input_ids" in inputs:
            role = "embedding"
        elif "attention_mask" in inputs:
            role = "blocks"
        else:
            role = "dropout" if "inputs_embeds" in inputs else "norm"
        if role in names:
            return None
        names[role] = name
    return names if {"embedding", "blocks", "norm"} <= names.keys() else None


def _row_with_forward(kind: str, model: Any, roles: Mapping[str, str], part: str) -> ModelFamily:
    try:
        forward = _forward(model, roles)
    except (OSError, TypeError, SyntaxError, AttributeError):  # no single class, or no source
        forward = None
    for known, row in FAMILIES.items():
        if row.rotary is not None and _forwards(known)[part] == forward:
            return row
    raise SplitError(
        f"no way to split a model of type {kind!r}: the forward of {model.__name__} differs from that of every family "
        f"here ({', '.join(FAMILIES)}), so its layers alone would give other numbers. Give the model as a list of layers"
    )


@cache
def _forwards(kind: str) -> dict[str, Any]:
    """Return the forwards of a family in the table."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    row, config_class = FAMILIES[kind], CONFIG_MAPPING[kind]
    with_head = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    modules = {"embedding": row.embedding, "blocks": row.blocks, "norm": row.norm, "dropout": row.dropout}
    roles = {name.rpartition(".")[2]: role for role, name in modules.items() if name}
    return {
        "inner": _forward(MODEL_MAPPING[config_class], roles),
        "with head": _forward(with_head, {with_head.base_model_prefix: "inner"}),
    }


def _forward(model: Any, roles: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the statements of a class's forward, with roles for names, and the globals that they use."""
    function: Any = inspect.unwrap(model.forward)
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    tree.decorator_list, tree.returns = [], None
    tree = _Normalised(roles).visit(tree)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return ast.unparse(tree), {name: function.__globals__[name] for name in used & {*function.__globals__}}


class _Normalised(ast.NodeTransformer):
    """A syntax tree without annotations, with roles for attributes of ``self``, and sorted keyword arguments."""

    def __init__(self, roles: Mapping[str, str]) -> None:
        self.roles = roles

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            node.attr = self.roles.get(node.attr, node.attr)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords.sort(key=lambda keyword: keyword.arg or "~")  # ** last
        return node
