"""Names in docstrings and annotations: an entry for each, and links to where the reference lists them.

Annotations name a class by the module that defines it, ``penstock.schedule.schedule.Schedule``; the reference lists
``penstock.Schedule``. Docstrings put names and code between single backticks: the names become links, the rest code.
"""

from __future__ import annotations

import re
from itertools import takewhile

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import penstock
import penstock.plan

HOMES = {
    f"{home}.{name}": f"{package.__name__}.{name}"
    for package in (penstock.plan, penstock)
    for name, home in package._HOME.items()
}
SHARED = re.compile(r"( +)([*\w]+(?:, [*\w]+)+):(?= )")
"""First line of an entry of several names, such as ``low, high: bounds of ...``."""


def split_entries(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Give each name of an entry such as ``low, high: ...`` an entry, with its own type, before napoleon reads them."""
    if what in ("attribute", "property") and lines:  # napoleon would take words before a colon for a type
        lines[0] = lines[0].replace(": ", " – ", 1)
    if not {"Args:", "Attributes:", "Raises:"} & set(lines):
        return
    made: list[str] = []
    for number, line in enumerate(lines):
        match = SHARED.match(line)
        if match is None:
            made.append(line)
            continue
        indent, names = match.groups()
        # Every entry but the last is whole here; the loop adds the lines that follow to the last one.
        rest = [*takewhile(re.compile(f"{indent} ").match, lines[number + 1 :])]
        for each in names.split(", ")[:-1]:
            made += [f"{indent}{each}:{line[match.end() :]}", *rest]
        made.append(f"{indent}{names.split(', ')[-1]}:{line[match.end() :]}")
    lines[:] = made


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Node) -> nodes.Node | None:
    """Return the link of a name that Sphinx did not find, plain code for what is not a name, or None."""
    if node.get("refdomain") != "py":
        return None
    target, domain = node["reftarget"], env.get_domain("py")
    names = [HOMES.get(target), f"penstock.{target}", f"penstock.plan.{target}"]
    if target.isidentifier():
        names += [
            name
            for name, entry in domain.objects.items()
            if name.endswith(f".{target}") and entry.objtype in ("class", "exception", "function", "type")
        ]
    listed = next((name for name in names if name is not None and name in domain.objects), None)
    if listed is not None:
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", listed, node, content)
    return content if node["reftype"] == "obj" else None


def drop_fields(app: Sphinx, domain: str, kind: str, content: nodes.Element) -> None:
    """Leave out the parameters of a dataclass that its attributes describe already, with their types."""
    for fields in content.findall(nodes.field_list):
        names = [field[0].astext().split() for field in fields]
        attributes = {name[-1] for name in names if name[0] == "ivar"}
        for field, name in zip(list(fields), names, strict=True):
            if name[0] in ("param", "type") and name[-1] in attributes:
                fields.remove(field)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("autodoc-process-docstring", split_entries, priority=400)
    app.connect("object-description-transform", drop_fields, priority=600)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
