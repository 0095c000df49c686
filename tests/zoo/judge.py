"""What became of a case: bit-equal, bounded, refused by name, or failed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from tests.zoo.case import Case
from tests.zoo.habits import HABITS, LOSSES
from tests.zoo.plain import Plain, Terms, wide
from tests.zoo.record import Raised, Run, Step, dense, same
from tests.zoo.subject import make_batch, shares

UNIT = {torch.float64: 2.0**-53, torch.complex64: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The relative error of one addition; of float32 it is 2**-24."""


SHARDED = r"began to require a gradient after ZeRO"
"""What is refused where replicas divide the optimizer."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        outcome: "bit-equal", "bounded", "refused" or "FAILED".
        why: what was refused, or what is wrong.
    """

    outcome: str
    why: str = ""


class WrongError(Exception):
    """Something differs that may not."""


def judge(case: Case, runs: Sequence[Run]) -> Verdict:
    """Compare what the processes of a run found with plain PyTorch."""
    with warnings.catch_warnings(), torch.random.fork_rng(()):
        warnings.simplefilter("ignore")
        try:
            return _judge(case, runs)
        except WrongError as wrong:
            return Verdict("FAILED", str(wrong))


def _judge(case: Case, runs: Sequence[Run]) -> Verdict:
    error = lead(runs)
    done = len(runs[0].steps)
    plain = Plain(case) if case.in_order else Terms(case)
    for number in range(done + (error is not None)):
        try:
            plain.begin(number)
            losses = torch.stack(plain.accumulate(number))
            gradients = plain.total if isinstance(plain, Terms) else plain.gradients()
            spoiled = not finite(case, number, losses, gradients)
        except Exception as failure:
            word = f"plain PyTorch raises {type(failure).__name__} in step {number}: {str(failure)[:200]}"
            if error is not None and number == done:
                return refused(error, word)
            raise WrongError(f"{word}; Penstock does not") from failure
        if error is not None and number == done:
            if error.kind == "NonFiniteError" and (spoiled or overflows(gradients)):
                return refused(error, "")
            return refused(error, "", allowed(case))
        if spoiled:
            raise WrongError(
                f"step {number}: a loss or a gradient is not finite, and the step is not refused"
            )
        found = joined([run.steps[number] for run in runs], case.reduces(number))
        compare(case, plain, number, losses, gradients, found)
        if isinstance(plain, Terms):
            plain.take(found.gradients, found.buffers)
        try:
            plain.end(number)
        except Exception as failure:
            raise WrongError(f"plain PyTorch's update raises {failure!r}; Penstock's does not") from failure
        expect(f"weights after step {number}", found.weights, plain.weights())
    return Verdict("bit-equal" if case.in_order else "bounded")


def lead(runs: Sequence[Run]) -> Raised | None:
    """The error of a run, if there is one: that of the rank that failed first."""
    errors = [run.raised for run in runs if run.raised is not None]
    if not errors:
        return None
    if len(errors) < len(runs):
        raise WrongError(
            f"{len(errors)} of {len(runs)} processes failed, and the others went on: {errors[0].message}"
        )
    first = next((e for e in errors if not e.told), errors[0])
    if len({len(run.steps) for run in runs}) > 1:
        raise WrongError(f"processes failed in different steps: {first.message}")
    return first


def refused(error: Raised, plain: str, may: Sequence[str] | None = None) -> Verdict:
    """A refusal, if it is one: of Penstock's own, before anything was changed, and for a reason that is allowed."""
    what = f"{error.kind}: {error.message}"
    if not error.known:
        raise WrongError(f"an error that is not Penstock's own ({plain or 'plain PyTorch has none'}): {what}")
    if error.told:
        raise WrongError(f"no rank says what failed: {what}")
    if not error.untouched:
        raise WrongError(f"weights were changed, or the step was counted, before: {what}")
    if may is not None and not any(re.search(pattern, error.message) for pattern in may):
        raise WrongError(f"refused, and plain PyTorch is not: {what}")
    return Verdict("refused", what)


def allowed(case: Case) -> list[str]:
    """Regular expressions of the refusals that a case may end in."""
    there = {"always", "split", "tied"} | ({"copies"} if case.copies else set())
    there |= {"recompute"} if case.recompute != "none" else set()
    there |= {"threads"} if case.transport == "threads" and case.ranks > 1 else set()
    found = [kind.refused for kind in case.entries if there & set(kind.when.split(" or "))]
    found += [SHARDED] if case.shard != "none" else []
    own = case.own.refused if case.own is not None else ""
    return [text for text in (*found, own, HABITS[case.habit].refused, LOSSES[case.loss].refused) if text]


def finite(case: Case, number: int, losses: Tensor, gradients: Mapping[str, Tensor | None]) -> bool:
    """Whether all that counts is."""
    parts = make_batch(case, number).parts
    counting = [loss for loss, (factor, _) in zip(losses, shares(case, parts), strict=True) if factor]
    values = [*counting, *(g for g in gradients.values() if g is not None)]
    return all(bool(torch.isfinite(dense(value)).all()) for value in values)


def overflows(gradients: Mapping[str, Tensor | None]) -> bool:
    """Whether the norm of gradients that are finite is not, in float32: Penstock looks at norms."""
    largest = [dense(g).abs().max().item() for g in gradients.values() if g is not None and g.numel()]
    return max(largest, default=0.0) > 1e18


def joined(steps: Sequence[Step], reduced: bool) -> Step:
    """What processes found, put together; where several have the same thing, it must be the same.

    Args:
        steps: of the processes.
        reduced: whether replicas have added up their gradients.
    """
    first = steps[0]
    for other in steps[1:]:
        expect("losses of the processes", {"": other.losses}, {"": first.losses})
        for what in ("gradients", "weights", "buffers"):
            ours, theirs = getattr(first, what), getattr(other, what)
            common = ours.keys() & theirs.keys()
            if reduced or what != "gradients":
                expect(
                    f"{what} of two processes", {n: theirs[n] for n in common}, {n: ours[n] for n in common}
                )
            ours.update(theirs)
    return first


def compare(
    case: Case,
    plain: Plain,
    number: int,
    losses: Tensor,
    gradients: Mapping[str, Tensor | None],
    found: Step,
) -> None:
    """Everything but the update."""
    if plain.evaluated is not None:
        expect(f"evaluation before step {number}", {"": found.evaluated}, {"": plain.evaluated})
    counting = torch.tensor([bool(f) for f, _ in shares(case, make_batch(case, number).parts)])
    expect(
        f"losses of step {number}",
        {"": found.losses[counting]},
        {"": losses[counting].to(found.losses.dtype)},
    )
    if isinstance(plain, Terms) and not case.reduces(number):
        pass
    elif isinstance(plain, Terms):
        within(f"gradients of step {number}", plain, found.gradients)
    else:
        expect(f"gradients of step {number}", found.gradients, gradients)
    wanted = plain.buffers()
    if case.copies:
        statistics(f"buffers after step {number}", case, plain, wanted, found.buffers)
    expect(f"buffers after step {number}", found.buffers, wanted)


def statistics(
    what: str, case: Case, plain: Plain, wanted: dict[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    """Where a stage has copies: what they agreed on, for what docs/models.md says need not have plain PyTorch's bits.

    Running statistics of batch normalisation are moving averages over the microbatches: of one copy's, then of the
    other's, joined with a few roundings more. Copies of Chimera and round trip take turns, which is another average.
    Counters count one copy's microbatches.
    """
    for name, module in plain.owners().items():
        if name not in found or name not in wanted or same(found[name], wanted[name]):
            continue
        if isinstance(module, _BatchNorm) and wanted[name].is_floating_point():
            apart = (found[name].double() - wanted[name].double()).abs().max().item()
            roundings = 4 * (number_of_updates(case) + 4)
            turns = case.schedule in ("chimera", "round-trip")
            if not turns and apart > roundings * 2.0**-24 * wanted[name].abs().max().item():
                raise WrongError(f"{what}: {describe(name, found[name], wanted[name])}")
        elif not getattr(module, "counts", False):
            continue
        wanted[name] = found[name]


def number_of_updates(case: Case) -> int:
    """How often a forward in training has run, at most."""
    return case.steps * case.microbatches * case.dp


def expect(what: str, found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> None:
    """The same names with the same bits."""
    if found.keys() != wanted.keys():
        raise WrongError(
            f"{what}: names that one side has and the other has not: {sorted(found.keys() ^ wanted.keys())}"
        )
    wrong = [name for name, value in wanted.items() if not same(found[name], value)]
    if wrong:
        raise WrongError(
            f"{what} differ: {'; '.join(describe(n, found[n], wanted[n]) for n in wrong[:4])} ({len(wrong)} in all)"
        )


def describe(name: str, found: Tensor | None, wanted: Tensor | None) -> str:
    if found is None or wanted is None:
        return f"{name} {'None' if found is None else 'there'} instead of {'None' if wanted is None else 'there'}"
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"{name} {found.dtype} {tuple(found.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}"
    found, wanted = dense(found), dense(wanted)
    apart = (found.to(wide(found.dtype)) - wanted.to(wide(wanted.dtype))).abs().max().item()
    return f"{name} by {apart:.2g} of {wanted.abs().max().item():.2g}"


def within(what: str, plain: Terms, found: Mapping[str, Tensor | None]) -> None:
    """Gradients as near to the exact sum of their terms as any order of summation is.

    A sum of n terms in any order is at most n u Σ|terms| from the exact one, u the relative error of an addition
    (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). A layer that runs twice for a microbatch adds what both
    give within it, too, where a gradient may be a small difference of numbers as large as the layer's largest gradient.
    Where autocast casts a weight once for several places
    their gradients are added in bfloat16, in plain PyTorch as well.
    """
    for name, parameter in plain.parameters().items():
        grad, total = found.get(name), plain.total.get(name)
        if (grad is None) != (total is None):
            raise WrongError(f"{what}: {describe(name, grad, total)}")
        if grad is None or total is None:
            continue
        if grad.dtype != parameter.dtype:
            raise WrongError(f"{what}: {name} is {grad.dtype}, and its weight {parameter.dtype}")
        low = plain.case.autocast and name in plain.tied
        unit = UNIT[torch.bfloat16] if low else UNIT.get(grad.dtype, 2.0**-24)
        twice = plain.case.own is not None and plain.case.own.bounded
        within_layers = plain.largest[name] if twice else 0.0
        bound = (plain.terms[name] + plain.case.dp + 2) * unit * (
            plain.absolute[name] + within_layers
        ) + 1e-40
        apart = (dense(grad).to(total.dtype) - total).abs()
        if not bool((apart <= bound).all()):
            ratio = (apart / bound).max().item()
            raise WrongError(
                f"{what}: {name} is {ratio:.3g} times as far from the exact sum as any order of summation can be"
            )
