"""The table in docs/models.md of what is bit-equal, bounded and refused: ``python -m tests.zoo.docs`` writes it anew."""

from __future__ import annotations

from pathlib import Path

import tests.zoo.forwards as forwards
import tests.zoo.kinds as kinds
from tests.zoo.forward import FORWARDS
from tests.zoo.kind import KINDS, Kind
from tests.zoo.not_yet import NOT_YET, TOGETHER

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- from tests/zoo: python -m tests.zoo.docs -->", "<!-- end -->"

WHERE = {
    "always": "",
    "recompute": " (with recompute)",
    "split": " (where the model is cut there)",
    "tied": " (in a layer that several ranks call)",
    "copies": " (with copies)",
    "copies or recompute": " (with copies or recompute)",
    "recompute or threads": " (with recompute, and where ranks are threads and two are in it at once)",
}


def row(entries: list[Kind], title: str) -> str:
    """What becomes of the kinds of one file."""
    equal = [k.what for k in entries if not k.bounded and (not k.refused or k.when != "always")]
    bounded = [k.what for k in entries if k.bounded]
    cells = [
        "; ".join(equal),
        "; ".join(bounded),
        "; ".join(refusal(k) for k in entries if k.refused or not k.copies),
    ]
    return f"| {title} | " + " | ".join(cell.replace("|", "\\\\|") or "–" for cell in cells) + " |"


def refusal(kind: Kind) -> str:
    if not kind.copies:
        return f"{kind.what}: with copies each has its own state"
    where = WHERE[kind.when]
    return f"{kind.what}{where}"


def table() -> str:
    """The table, in Markdown."""
    lines = ["| group | bit-equal | bounded | refused by name |", "|---|---|---|---|"]
    for name in kinds.__all__:
        title = (getattr(kinds, name).__doc__ or "").strip().splitlines()[0].rstrip(".")
        lines.append(row([k for k in KINDS.values() if k.group == name and k.name not in NOT_YET], title))
    for name in forwards.__all__:
        title = (getattr(forwards, name).__doc__ or "").strip().splitlines()[0].rstrip(".")
        entries = [f for f in FORWARDS.values() if f.group == name]
        must = "; ".join(f.what for f in entries if not f.refused and not f.bounded)
        may = "; ".join(f.what for f in entries if f.refused)
        lines.append(f"| {title} | {must or '–'} | – | {may or '–'} (or bit-equal) |")
    if open_ends := sorted({*NOT_YET.values(), *(why for why, _ in TOGETHER)}):
        lines += ["", "Known not to hold yet: " + "; ".join(open_ends) + "."]
    return "\n".join(lines)


def write() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")


if __name__ == "__main__":
    write()
