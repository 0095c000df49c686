"""Sphinx's configuration of the documentation; ``make docs`` builds it into ``docs/_build/html``.

The build needs no network: pictures are drawn, notebooks run and pages of the command line are made from the sources.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import penstock

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_extensions"))

project = "Penstock"
author = "the Penstock authors"
copyright = "the Penstock authors"
version = release = penstock.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "repository_links",
    "plain_types",
    "public_names",
    "command_help",
    "schedule_gallery",
    "llms",
]
exclude_patterns = ["_build", "_extensions", "_static"]

# Pages are read on GitHub, too: anchors are those that GitHub gives to headings.
myst_heading_anchors = 4
default_role = "py:obj"

# Notebooks run in an empty folder, with the same penstock as the build.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
os.environ["COLUMNS"] = "100"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(penstock.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
)
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

# Types are printed once: beside the meaning of each argument, not in the signature, too.
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
python_display_short_literal_types = True
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = True

# Names without an entry. Links to other projects would need their inventories, and with these the network.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|dist|nn|np|npt|numpy|os|pathlib|click|collections|contextlib|typing|fractions)\..*"),
    (r"py:.*", r"(Tensor|Optimizer|LRScheduler|DeviceMesh|Path|Callable|Sequence|Mapping|Any|Literal|tuple)"),
    (r"py:class", r"'[\w-]+'"),  # values of a Literal
    (
        r"py:class",
        r"penstock\..*\.(Shards|Space|StageModule|T|Workload|StageCosts|Activity)",
    ),
    (r"py:class", r"Visit|UnchangedModel|(penstock\.stage\.layers\.)?BatchNames"),  # internal, as those above
]

highlight_language = "text"
pygments_style = "friendly"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"Penstock {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
