"""Compare Penstock's public interface with the recorded one: ``python -m tools.public_api``, and ``--write`` to record it.

`make api` records it. Changes that break users are recorded if the rules of docs/stability.md allow them: before the first
release, with a new major version (a new minor one below 1.0), or for a name that is accepted because no release has had it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tools.interface import Entry, interface
from tools.release_check import ROOT, releases, version

RECORD = ROOT / "tools" / "public_api.json"


class Change(NamedTuple):
    """A difference between the recorded interface and the present one.

    Attributes:
        name: public name.
        what: the difference in words.
        breaks: whether code, commands or files that use the name may stop working.
    """

    name: str
    what: str
    breaks: bool


def changes(old: Mapping[str, Entry], new: Mapping[str, Entry]) -> list[Change]:
    """Return the differences between two interfaces, by name."""
    differences = [Change(name, "was removed", True) for name in old.keys() - new.keys()]
    differences += [Change(name, "is new", False) for name in new.keys() - old.keys()]
    for name in old.keys() & new.keys():
        differences += [Change(name, what, breaks) for what, breaks in _compare(old[name], new[name])]
    return sorted(differences)


def may_break(here: str, last: str | None) -> bool:
    """Return whether a version may break users of the last release; None if there was none."""
    if last is None:
        return True
    (major, minor), (last_major, last_minor) = (tuple(map(int, text.split(".")[:2])) for text in (here, last))
    return major > last_major or (last_major == 0 and (major, minor) > (last_major, last_minor))


def report(differences: Collection[Change], last: str | None) -> str:
    """Return the changes as text, with what to do; empty if there are none."""
    lines: list[str] = []
    if breaking := [change for change in differences if change.breaks]:
        lines += [
            f"changes of the public interface that break those who use it ({len(breaking)}):",
            *(f"  {change.name} {change.what}" for change in breaking),
        ]
        if last is None:
            lines += [
                "do: nothing has been released yet, so `make api` records them; add a line to CHANGELOG.md"
            ]
        else:
            lines += [
                f"do: keep what {last} had and deprecate it first (docs/stability.md). If its time is over, raise the",
                "    major version (below 1.0 the minor one) and run `make api`. If no release has had the name, run",
                f"    `make api ACCEPT={breaking[0].name.replace(' ', '_')}`",
            ]
    if other := [change for change in differences if not change.breaks]:
        lines += [
            f"other changes of the public interface that are not recorded ({len(other)}):",
            *(f"  {change.name} {change.what}" for change in other),
            "do: run `make api` and commit tools/public_api.json; take a name that is not meant to be public out of __all__",
        ]
    return "\n".join(lines)


def last_release() -> str | None:
    """Return the newest version in the changelog; None before the first release."""
    listed = releases((ROOT / "CHANGELOG.md").read_text())
    return listed[0][0] if listed else None


def recorded() -> dict[str, Entry]:
    """Return the recorded interface."""
    table: dict[str, Entry] = json.loads(RECORD.read_text())
    return table


def write(entries: Mapping[str, Entry]) -> None:
    """Record an interface, one line a name, so that a review shows what changes."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items()))
    RECORD.write_text(f"{{\n{lines}\n}}\n")


def _compare(old: Entry, new: Entry) -> list[tuple[str, bool]]:
    if old == new:
        return []
    if old["is"] != new["is"]:
        return [(f"was a {old['is']} and is a {new['is']}", True)]
    differences: list[tuple[str, bool]] = []
    if old.get("parameters") != new.get("parameters"):
        differences += _compare_parameters(old.get("parameters", []), new.get("parameters", []))
    for base in set(old.get("bases", ())) ^ set(new.get("bases", ())):
        lost = base in old["bases"]
        differences.append((f"is no longer a {base}" if lost else f"is now also a {base}", lost))
    for choice in set(old.get("choices", ())) ^ set(new.get("choices", ())):
        lost = choice in old["choices"]
        differences.append((f"{'no longer' if lost else 'now'} takes {choice!r}", lost))
    if old.get("required") != new.get("required"):
        differences.append(
            ("is now required" if new["required"] else "is no longer required", new["required"])
        )
    differences += [
        (f"has {key} {new[key]!r}, was {old[key]!r}", True)
        for key in ("takes", "default", "value")
        if old.get(key) != new.get(key)
    ]
    if old.get("allowed") != new.get("allowed"):
        more = _words(old["allowed"]) < _words(new["allowed"])
        differences.append((f"allows {new['allowed']}, was {old['allowed']}", not more))
    return differences


def _words(allowed: str) -> set[str]:
    return set(re.findall(r"`[^`]*`", allowed))


def _compare_parameters(old: list[list[str | None]], new: list[list[str | None]]) -> list[tuple[str, bool]]:
    differences: list[tuple[str, bool]] = []
    before, now = {p[0]: p for p in old}, {p[0]: p for p in new}
    for name in before.keys() - now.keys():
        differences.append((f"has no parameter {name!r} any more", True))
    for name in now.keys() - before.keys():
        _, kind, default = now[name]
        required = default is None and kind not in ("*", "**")
        differences.append((f"has {'a new required' if required else 'a new'} parameter {name!r}", required))
    for name in before.keys() & now.keys():
        (_, kind, default), (_, new_kind, new_default) = before[name], now[name]
        if kind != new_kind and (kind, new_kind) != ("keyword", "either"):
            differences.append((f"takes parameter {name!r} by {new_kind}, was {kind}", True))
        if default != new_default:
            to = "no default" if new_default is None else f"default {new_default}"
            differences.append((f"has {to} for {name!r}, was {default or 'required'}", default is not None))
    # Arguments given by position must keep their meaning.
    places = [p[0] for p in old if p[1] in ("positional", "either")]
    if [p[0] for p in new if p[1] in ("positional", "either")][: len(places)] != places and not differences:
        differences.append(("takes its positional parameters in another order", True))
    return differences


def main() -> None:
    """Compare, or with ``--write`` record; exit with 1 if something is left to do."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.public_api", description="Penstock's public interface"
    )
    parser.add_argument(
        "--write", action="store_true", help="record the interface, if its changes are allowed"
    )
    parser.add_argument("--accept", nargs="*", default=[], help="names (spaces as _) that no release has had")
    arguments = parser.parse_args()
    new = interface()
    if not RECORD.exists():
        write(new)
        sys.exit(f"recorded {len(new)} names")
    differences, last = changes(recorded(), new), last_release()
    if not arguments.write:
        print(report(differences, last) or f"{len(new)} public names, as recorded")
        sys.exit(1 if differences else 0)
    refused = [c for c in differences if c.breaks and c.name.replace(" ", "_") not in arguments.accept]
    if refused and not may_break(version(), last):
        print(report(refused, last))
        sys.exit(1)
    write(new)
    print("\n".join(f"{c.name} {c.what}" for c in differences) or "nothing to record")


if __name__ == "__main__":
    main()
