"""Names in docstrings and annotations, resolved to the public names under which the reference lists them.

Annotations name a class by the module that defines it, ``penstock.schedule.schedule.Schedule``; the reference lists
``penstock.Schedule``. Docstrings put names and code between single backticks: the names become links, the rest code.
"""

from __future__ import annotations

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


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Node) -> nodes.Node | None:
    """Return the link of a name that Sphinx did not find, plain code for what is no name, or None."""
    if node.get("refdomain") != "py":
        return None
    target, domain = node["reftarget"], env.get_domain("py")
    names = [HOMES.get(target), f"penstock.{target}", f"penstock.plan.{target}"]
    found = next((name for name in names if name is not None and name in domain.objects), None)
    if found is not None:
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found, node, content)
    return content if node["reftype"] == "obj" else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
