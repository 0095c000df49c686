"""The mutants of bench.mutants are planted one at a time, and the command says of each what was found."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable

import pytest
import torch
from bench.mutants import forward_plants, subjects
from bench.mutants.mutant import BY_NAME, MUTANTS, Changes, Mutant
from bench.mutants.run import PLANTS
from torch import Tensor, nn

from bench import compare
from penstock.recordings.files import Kind
from penstock.stage.compute.runner import LossWeight

pytestmark = pytest.mark.slow

Command = Callable[..., tuple[bool, list[str]]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, in this process: whether it succeeded, and the lines that it printed."""
    monkeypatch.setattr(compare, "end_with_this_process", lambda: None)

    def run(*words: str) -> tuple[bool, list[str]]:
        monkeypatch.setattr(sys, "argv", ["bench.mutants", *words])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("bench.mutants", run_name="__main__")
        return not end.value.code, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("loss not divided", r"1f1b +yes +yes +step 0, microbatch 0: head, gradient of its output, is 4 of .*"),
        ("W dropped for a microbatch", r"zb-v +yes +yes +step 0: head.weight, gradient as .* lacks what microbatch 2 .*"),
        ("activation is not a number", r"1f1b +yes +yes +refused: NonFiniteError: .* the loss of microbatch 1 is NaN .*"),
        ("reduction skipped", r"dp +yes +yes +step 0: head.weight, gradient as .*, is not the same on processes 0 and 1 .*"),
    ],
)  # fmt: skip
def test_a_mutant_is_named(name: str, line: str, command: Command):
    good, lines = command("--only", name)
    assert good, lines
    row = next(each for each in lines if each.startswith(name))
    assert re.fullmatch(f"{name} +{line}", row), row
    assert lines[-5:-2] == [
        "detected: 1 of 1, 100.0%",
        "named: 1 of 1, 100.0%",
        f"refused by an error: {int('refused' in line)}; not reached or failed: 0; runs without a mutant that differ: 0",
    ]


def planted(monkeypatch: pytest.MonkeyPatch, name: str, plant: Callable[[Changes], None]) -> None:
    monkeypatch.setitem(
        MUTANTS,
        name,
        Mutant(
            name=name,
            source="test",
            subject=BY_NAME["1f1b"],
            name_is="^head$",
            kinds=(Kind.OUTPUT_GRADIENT,),
            plant=plant,
        ),
    )


@pytest.mark.exhaustive
def test_mutants_that_are_missed_unnamed_or_unreached_fail_the_command(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    def wrong_place(changes: Changes) -> None:
        forward_plants.change_inputs(changes, 1, lambda microbatch, right: right * 1.5)

    def not_reached(changes: Changes) -> None:
        forward_plants.change_inputs(changes, 9, lambda microbatch, right: right * 0)

    def same_values(changes: Changes) -> None:
        changes.replace(
            LossWeight,
            "apply",
            lambda apply: lambda self, loss: changes.made(apply(self, loss), apply(self, loss)),
        )

    def failing(changes: Changes) -> None:
        def apply(self: LossWeight, loss: Tensor) -> Tensor:
            raise changes.made(TypeError("no such thing"))

        changes.replace(LossWeight, "apply", lambda right: apply)

    for plant, words in (
        (wrong_place, r"yes +NO +step 0, microbatch 0: blocks\.2.*"),
        (not_reached, r"NO +NO +NOT REACHED: .*"),
        (same_values, r"NO +NO +NOT REACHED: .*"),
        (failing, r"NO +NO +ERROR: StageError: .* no such thing .*"),
    ):
        planted(monkeypatch, plant.__name__, plant)
        good, lines = command("--only", plant.__name__)
        assert not good
        row = next(each for each in lines if each.startswith(plant.__name__))
        assert re.fullmatch(f"{plant.__name__} +1f1b +{words}", row), row


def test_a_run_that_differs_without_a_mutant_fails_the_command(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    build = subjects.Subject.build
    calls: list[None] = []

    def other(self: subjects.Subject) -> nn.Module:
        calls.append(None)
        model = build(self)
        with torch.no_grad():
            model.head.weight += len(calls) - 1
        return model

    monkeypatch.setattr(subjects.Subject, "build", other)
    good, lines = command("--only", "loss not divided")
    assert not good
    assert lines[0].startswith("1f1b, without a mutant: before the first step: head.weight, its value, ")
    assert lines[-3].endswith("runs without a mutant that differ: 1")


def test_the_list_has_every_mutant_once(command: Command):
    good, lines = command("--list")
    names = [line[:50].rstrip() for line in lines[:-1]]
    assert good
    assert names == list(MUTANTS)
    assert len(set(names)) == len(names) >= 60
    # Each is a function of its own.
    plants = [mutant.plant for mutant in MUTANTS.values()]
    assert len({(plant.__module__, plant.__name__) for plant in plants}) == len(plants)
    assert {plant.__module__ for plant in plants} == {module.__name__ for module in PLANTS}


def test_what_is_replaced_comes_back():
    right = vars(LossWeight)["apply"]
    with Changes().planted(MUTANTS["loss not divided"].plant):
        assert vars(LossWeight)["apply"] is not right
    assert vars(LossWeight)["apply"] is right
