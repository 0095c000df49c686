"""Examples of unequal length, grouped into microbatches of a limited number of padded tokens and of equal cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.base.counts import is_count, plural, require_count
from penstock.base.errors import BatchError, ConfigError

_HALVINGS = 30
"""Of the interval of costs in which the smallest cap is found; then it is known to a part in a billion."""


def by_tokens(
    lengths: Sequence[int], tokens: int, *, least: int = 1, replicas: int = 1, attention: float = 0.0
) -> list[list[int]]:
    """Group the examples of a batch into microbatches of at most so many padded tokens (rows x longest row).

    There are as few groups as the limit, `least` and `replicas` allow. Among these, the costliest one costs as little as
    possible, where a group of rows padded to L tokens costs ``rows * (L + attention * L**2)``::

        groups = penstock.by_tokens([len(row["input_ids"]) for row in rows], 4096, least=pipe.ranks)
        parts = [collate([rows[i] for i in group]) for group in groups]
        batch = {name: penstock.Microbatches([part[name] for part in parts]) for name in parts[0]}
        pipe.step(batch, microbatches=len(groups))

    Args:
        lengths: number of tokens of each example.
        tokens: most tokens of a group, padding included.
        least: smallest number of groups for each replica, such as the ranks of the pipeline (default 1).
        replicas: pipelines that share the batch (default 1). Each gets as many groups, one after the other, and the costs
            are dealt out evenly; a step's ``microbatches`` is then ``len(groups) // replicas``.
        attention: cost of attention between two tokens over that of everything else for one token (default 0.0). For a
            transformer of n layers, width d and N weights in its blocks, about ``2 * n * d / N``.

    Returns:
        Indices of the examples of each group, the longest first.

    Raises:
        BatchError: if an example is longer than `tokens`, or there are fewer examples than groups.
        ConfigError: if another argument is no such number.
    """
    for name, value in (("tokens", tokens), ("least", least), ("replicas", replicas)):
        require_count(name, value)
    known: object = attention
    if isinstance(known, bool) or not isinstance(known, int | float) or not 0 <= known < float("inf"):
        raise ConfigError(f"attention must be a number of at least 0, got {attention!r}")
    for n, length in enumerate(lengths):
        if not is_count(length):
            raise BatchError(f"lengths must be whole numbers of at least 1, got {length!r} for example {n}")
    groups, count = grouped(lengths, tokens, lambda needed: max(needed, least), replicas, attention)
    if len(groups) < count:
        raise BatchError(
            f"a batch of {plural(len(lengths), 'example')} is too small for {plural(count, 'group')}, each of at least one; "
            "give larger batches, or a smaller least"
        )
    return groups


def grouped(
    lengths: Sequence[int], tokens: int, allowed: Callable[[int], int], replicas: int, attention: float
) -> tuple[list[list[int]], int]:
    """Return the groups of `by_tokens`, and the number that all replicas need, which fewer examples cannot fill.

    Args:
        allowed: function from the fewest groups of a replica to the number that it shall have.
    """
    if lengths and (longest := max(lengths)) > tokens:
        raise BatchError(
            f"an example has {longest} tokens, more than the {tokens} that a microbatch may have; allow at least {longest}, "
            "or cut longer examples or leave them out of the data"
        )
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])

    def cost(length: int) -> float:
        return length + attention * length**2

    def greedy(cap: float) -> list[list[int]]:
        # From the longest on, a group's first example sets its width, and later groups may have more rows. So none can
        # do with fewer groups than this one, which fills each before it begins the next.
        groups: list[list[int]] = []
        rows = 0
        for n in order:
            if not groups or len(groups[-1]) == rows:
                rows = max(1, int(min(tokens // lengths[n], cap / cost(lengths[n]))))
                groups.append([])
            groups[-1].append(n)
        return groups

    groups = greedy(float("inf"))
    count = replicas * allowed(-(-len(groups) // replicas))
    low, high = 0.0, cost(tokens)
    target = min(count, len(order))
    for _ in range(_HALVINGS):
        cap = (low + high) / 2
        if len(found := greedy(cap)) <= target:
            groups, high = found, cap
        else:
            low = cap

    def group_cost(group: Sequence[int]) -> float:
        return len(group) * cost(lengths[group[0]])

    # Where rows are equal, no cap gives some numbers of groups.
    while len(groups) < target:
        largest = max((each for each in groups if len(each) > 1), key=group_cost)
        groups.remove(largest)
        half = (len(largest) + 1) // 2
        groups += [largest[:half], largest[half:]]
    groups.sort(key=group_cost, reverse=True)
    return _dealt(groups, replicas), count


def _dealt(groups: list[list[int]], replicas: int) -> list[list[int]]:
    """Return groups, given from the costliest on, so that each replica's are neighbours and cost about the same."""
    hands: list[list[list[int]]] = [[] for _ in range(replicas)]
    for n, group in enumerate(groups):
        turn, place = divmod(n, replicas)
        hands[replicas - 1 - place if turn % 2 else place].append(group)
    return [group for hand in hands for group in hand]
