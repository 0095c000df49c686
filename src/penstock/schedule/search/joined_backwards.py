"""Orders in which some backwards run whole and others as two halves."""

from __future__ import annotations

import numpy as np

from penstock.schedule.search.order_problem import GRADIENT, WEIGHT, WHOLE, Ints, OrderProblem, numbers


def joined(problem: OrderProblem, codes: Ints) -> Ints:
    """Return an order with a B in place of every I that its W follows at once."""
    changed = codes.copy()
    first = np.flatnonzero((codes[:-1] % 4 == GRADIENT) & (codes[1:] == codes[:-1] - GRADIENT + WEIGHT))
    number = np.concatenate([numbers(own) for own in problem.lists(codes)])
    first = first[number[first] == number[first + 1]]
    changed[first] += WHOLE - GRADIENT
    return np.delete(changed, first + 1)
