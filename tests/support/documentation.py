"""Pages of the documentation, with their blocks, commands, headings and links."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROGRAMS = ("penstock", "python", "torchrun", "srun", "pip")
"""Programs whose lines in a block are commands."""

_FENCED = re.compile(r"^(`{3,})([^\n]*)\n(.*?)^\1$", re.S | re.M)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}[^\n]*\n(?:\n(?= {4}))?)+")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.M)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        page: name of the page below ``docs/``.
        kind: words after the fence, such as ``python``; "indented" without a fence.
        text: lines of the block.
    """

    page: str
    kind: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Commands of the block: lines after ``$``, or lines that begin with a program; each on one line."""
        lines = re.sub(r"\\\n *", "", self.text).splitlines()
        if self.kind in ("text", "console"):
            return [line[2:] for line in lines if line.startswith("$ ")]
        if self.kind not in ("sh", "indented"):
            return []
        without_comments = [re.sub(r"\s+#.*", "", line) for line in lines]
        return [line for line in without_comments if line.split(" ")[0] in PROGRAMS]


def pages() -> list[Path]:
    """Return every Markdown file that is shown to readers and not made when the site is built."""
    made = {DOCS / "_build", DOCS / "gallery"}
    found = [
        page
        for folder, pattern in (("", "*.md"), ("docs", "**/*.md"), ("bench", "*.md"), ("recipes", "**/*.md"))
        for page in (ROOT / folder).glob(pattern)
    ]
    return sorted(page for page in found if not made & set(page.parents))


def blocks(page: Path) -> list[Block]:
    """Return the fenced and the indented blocks of a page, in their order."""
    name = page.relative_to(DOCS).as_posix() if DOCS in page.parents else page.relative_to(ROOT).as_posix()
    text = page.read_text()
    placed = [(match.start(), Block(name, match[2].strip(), match[3])) for match in _FENCED.finditer(text)]
    # Letters of fenced blocks become others, so that places stay and their lines do not count as indented.
    rest = _FENCED.sub(lambda match: re.sub(r"[^\n]", "-", match[0]), text)
    for match in _INDENTED.finditer(rest):
        lines = [line.removeprefix("    ") for line in match[0].splitlines()]
        placed.append((match.start(), Block(name, "indented", "\n".join(lines) + "\n")))
    return [block for _, block in sorted(placed, key=lambda each: each[0])]


def links(page: Path) -> list[str]:
    """Return the targets of all links and pictures of a page that are paths or anchors."""
    text = _FENCED.sub("", page.read_text())
    text = re.sub(r"`[^`\n]*`", "", text)
    return [target for target in _LINK.findall(text) if not re.match(r"\w+:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    names: list[str] = []
    for heading in _HEADING.findall(_FENCED.sub("", page.read_text())):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.append(name if name not in names else f"{name}-{names.count(name)}")
    return set(names)


def llama_3_8b(root: Path) -> None:
    """Write the folder of the model that pages plan: its sizes, without weights."""
    sizes = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    (root / "llama-3-8b").mkdir()
    (root / "llama-3-8b" / "config.json").write_text(json.dumps(sizes))
