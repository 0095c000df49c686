"""The first tensor that differs is named, with what it looks like; damaged and other recordings are refused by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import penstock
from penstock.base.errors import ConfigError, DataError
from penstock.cli import group
from penstock.recordings import files
from tests.verify.loops import MICROBATCHES, accumulate, batch, loss_of, make, piped, plain

Run = Callable[[nn.Module, torch.Tensor, int], None]


def with_parts(change: Callable[[list[torch.Tensor], nn.Module, int], None]) -> Run:
    """A step whose microbatches are changed before they run."""

    def run(model: nn.Module, ids: torch.Tensor, step: int) -> None:
        parts = list(ids.chunk(MICROBATCHES))
        change(parts, model, step)
        for part in parts:
            (loss_of(model(part), part) / MICROBATCHES).backward()

    return run


def exchanged(parts: list[torch.Tensor], model: nn.Module, step: int) -> None:
    parts[1], parts[2] = parts[2], parts[1]


def wrong_count(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    for part in ids.chunk(MICROBATCHES):
        (loss_of(model(part), part) / (MICROBATCHES * (1 + step))).backward()


def left_out(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    weight = model.blocks[2].up.weight
    for n, part in enumerate(ids.chunk(MICROBATCHES)):
        before = None if weight.grad is None else weight.grad.clone()
        (loss_of(model(part), part) / MICROBATCHES).backward()
        if n == 3:
            weight.grad = before


def added_twice(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    weight = model.blocks[1].down.weight
    for n, part in enumerate(ids.chunk(MICROBATCHES)):
        before = 0 if weight.grad is None else weight.grad.clone()
        (loss_of(model(part), part) / MICROBATCHES).backward()
        if n == 1:
            weight.grad = weight.grad + (weight.grad - before)


def shifted_tokens(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    for n, part in enumerate(ids.chunk(MICROBATCHES)):
        given = torch.cat([part[:, :8], part[:, 8:].roll(1, 1)], 1) if n == 2 else part
        (loss_of(model(given), part) / MICROBATCHES).backward()


def cut_backward(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    hook = model.blocks[1].norm.register_forward_pre_hook(
        lambda module, args: tuple(a.detach() for a in args)
    )
    accumulate(model, ids, step)
    hook.remove()


def spoiled(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    accumulate(model, ids, step)
    model.blocks[3].norm.bias.grad[2] = float("nan")


def frozen(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    accumulate(model, ids, step)
    model.blocks[0].up.bias.grad = None


def backward_left_out(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    for n, part in enumerate(ids.chunk(MICROBATCHES)):
        loss = loss_of(model(part), part) / MICROBATCHES
        if n != 2:
            loss.backward()


def block_never_run(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    blocks, model.blocks = model.blocks, nn.ModuleList(b for n, b in enumerate(model.blocks) if n != 1)
    accumulate(model, ids, step)
    model.blocks = blocks
    for parameter in blocks[1].parameters():
        parameter.grad = torch.zeros_like(parameter)


def block_run_twice(model: nn.Module, ids: torch.Tensor, step: int) -> None:
    blocks = model.blocks
    model.blocks = nn.ModuleList([blocks[0], blocks[1], blocks[1], *blocks[2:]])
    accumulate(model, ids, step)
    model.blocks = blocks


@pytest.mark.parametrize(
    ("run", "first"),
    [
        (
            with_parts(exchanged),
            r"step 0, microbatch 1: table, output, has the values that the reference has in step 0, microbatch 2: table, ",
        ),
        (wrong_count, r"step 1, microbatch 0: head, gradient of its output, is 0.5 of .* \(a factor of 1/2\); \d+ tensors"),
        (left_out, r"step 0: blocks.2.up.weight, gradient as .*, lacks what microbatch 3 gives; 25 other gradients are "),
        (added_twice, r"step 0: blocks.1.down.weight, gradient as .*, has what microbatch 1 gives twice; 25 other "),
        (shifted_tokens, r"step 0, microbatch 2: table, output, only indices 8 to 11 of its second dimension of 12 differ"),
        (
            cut_backward,
            r"step 0, microbatch 0: blocks.0, gradient of its output, has the values that .* blocks.1, gradient of its",
        ),
        (
            backward_left_out,
            r"step 0, microbatch 2: head, gradient of its output, was not computed; the reference has it",
        ),
        (block_never_run, r"step 0, microbatch 0: blocks.1, output, was not computed; the reference has it; \d+ tensors"),
        (block_run_twice, r"step 0, microbatch 0: blocks.1.norm, call 2, output, is not in the reference; \d+ tensors"),
        (spoiled, r"step 0: .*, gradient as the optimizer sees it, has \d+ values that are not finite, and the refer"),
        (frozen, r"step 0: blocks.0.up.bias, gradient as the optimizer sees it, was not computed; the reference has it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(run: Run, first: str, reference: Path, tmp_path: Path):
    plain(tmp_path / "run", run)
    found = penstock.compare(reference, tmp_path / "run")
    assert re.match(first, str(found)), str(found)


def test_a_dtype_and_a_learning_rate(reference: Path, tmp_path: Path):
    piped(tmp_path / "cast", make(), autocast=torch.bfloat16)
    found = penstock.compare(reference, tmp_path / "cast")
    assert "blocks.0.up, output, is bfloat16, and the reference's float32" in str(found)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    with penstock.record(tmp_path / "rate", model, steps=1):
        accumulate(model, batch(0), 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = penstock.compare(reference, tmp_path / "rate")
    assert found.first is not None
    assert found.first.key.kind == files.Kind.PARAMETER
    assert "recorded on one side only: steps 1" in found.notes


def test_another_order_of_sums_agrees_and_more_does_not(reference: Path, tmp_path: Path):
    plain(tmp_path / "exact", dtype=torch.float64)

    def reversed_order(model: nn.Module, ids: torch.Tensor, step: int) -> None:
        # As the reference, but a step's microbatches are added up in another order.
        gradients = []
        for part in ids.chunk(MICROBATCHES):
            (loss_of(model(part), part) / MICROBATCHES).backward()
            gradients.append([p.grad for p in model.parameters()])
            model.zero_grad()
        for p, terms in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            p.grad = sum(reversed(terms))

    plain(tmp_path / "run", reversed_order)
    for exact in (None, tmp_path / "exact"):
        found = penstock.compare(reference, tmp_path / "run", exact=exact)
        assert found.good, str(found)
        assert found.rounded > 20
    assert not penstock.compare(reference, tmp_path / "run", bits=True).good

    def slightly_wrong(model: nn.Module, ids: torch.Tensor, step: int) -> None:
        reversed_order(model, ids, step)
        model.blocks[1].up.weight.grad *= 1 + 2e-5

    plain(tmp_path / "wrong", slightly_wrong)
    found = penstock.compare(reference, tmp_path / "wrong", exact=tmp_path / "exact")
    assert found.first is not None
    assert found.first.key.name == "blocks.1.up.weight"


def test_losses_of_another_scale_are_compared_by_it(reference: Path, tmp_path: Path):
    def scaled(model: nn.Module, ids: torch.Tensor, step: int) -> None:
        for part in ids.chunk(MICROBATCHES):
            loss_of(model(part), part).backward()
        for p in model.parameters():
            p.grad /= MICROBATCHES

    plain(tmp_path / "run", scaled)
    assert not penstock.compare(reference, tmp_path / "run").good
    assert penstock.compare(reference, tmp_path / "run", scale=MICROBATCHES).good
    with pytest.raises(ConfigError, match="scale must be a number above 0"):
        penstock.compare(reference, tmp_path / "run", scale=0.0)


def test_tensors_that_no_module_returns_are_noted(tmp_path: Path):
    for name, factor in (("one", 1.0), ("other", 3.0)):
        with penstock.record(tmp_path / name, make(), steps=1) as notes:
            notes.note("loss", torch.tensor(2.0), microbatch=0)
            notes.note("norm", torch.tensor(2.0) * factor)
    found = penstock.compare(tmp_path / "one", tmp_path / "other")
    assert str(found).startswith(
        "step 0: norm, output, is 3 of the reference's (a factor of 3); 27 tensors before it agree"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t * 1.001, "is 1.001 of the reference's"),
        (lambda t: t.bfloat16().float(), ", and rounding to bfloat16 would"),
    ],
)
def test_a_factor_near_one_and_rounding_to_bfloat16_are_told(
    change: Callable[[torch.Tensor], torch.Tensor], words: str, tmp_path: Path
):
    value = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for name, noted in (("one", value), ("other", change(value))):
        with penstock.record(tmp_path / name, make(), steps=1) as notes:
            notes.note("value", noted, microbatch=0)
    assert words in str(penstock.compare(tmp_path / "one", tmp_path / "other"))


def test_a_parameter_that_is_never_updated_is_named(reference: Path, tmp_path: Path):
    model = make()
    updated = [p for name, p in model.named_parameters() if name != "blocks.3.up.weight"]
    optimizer = torch.optim.AdamW(updated, lr=1e-2)
    with penstock.record(tmp_path / "run", model, steps=1):
        accumulate(model, batch(0), 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = penstock.compare(reference, tmp_path / "run")
    assert re.match(
        r"step 0: blocks.3.up.weight, gradient as .*, was not computed; the reference has it", str(found)
    )


def test_a_microbatch_that_does_not_count_needs_no_backward(tmp_path: Path):
    def weighed(model: nn.Module, ids: torch.Tensor, step: int) -> None:
        for n, part in enumerate(ids.chunk(MICROBATCHES)):
            (loss_of(model(part), part) * (n != 3)).backward()

    def left_out(model: nn.Module, ids: torch.Tensor, step: int) -> None:
        for n, part in enumerate(ids.chunk(MICROBATCHES)):
            loss = loss_of(model(part), part)
            if n != 3:
                loss.backward()

    plain(tmp_path / "reference", weighed)
    plain(tmp_path / "run", left_out)
    assert penstock.compare(tmp_path / "reference", tmp_path / "run").good
    assert penstock.compare(tmp_path / "run", tmp_path / "reference").good


def test_processes_that_disagree_are_named_where_all_other_gradients_have_a_factor(
    reference: Path, tmp_path: Path
):
    for process in range(2):

        def not_reduced(model: nn.Module, ids: torch.Tensor, step: int, process: int = process) -> None:
            accumulate(model, ids, step)
            for parameter in model.parameters():
                parameter.grad *= 0.01
            model.blocks[2].up.weight.grad *= 2 + process

        plain(tmp_path / str(process), not_reduced)
        text = (tmp_path / str(process) / "process-00000.jsonl").read_text()
        (tmp_path / "run").mkdir(exist_ok=True)
        file = tmp_path / "run" / f"process-0000{process}.jsonl"
        file.write_text(text.replace('"process":0', f'"process":{process}', 1))
    found = penstock.compare(reference, tmp_path / "run")
    assert re.match(r"step 0: .*, gradient as .*, is not the same on processes 0 and 1", str(found)), str(
        found
    )


def test_several_microbatches_may_share_a_backward(reference: Path, tmp_path: Path):
    def joint(model: nn.Module, ids: torch.Tensor, step: int) -> None:
        sum(loss_of(model(part), part) / MICROBATCHES for part in ids.chunk(MICROBATCHES)).backward()

    plain(tmp_path / "run", joint)
    found = penstock.compare(reference, tmp_path / "run")
    assert found.good, str(found)


def test_an_update_that_never_happens_is_a_difference(reference: Path, tmp_path: Path):
    for name, updates in (("last", 1), ("none", 0)):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with penstock.record(tmp_path / name, model):
            for step in range(2):
                optimizer.zero_grad()
                accumulate(model, batch(step), step)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if step < updates:
                    optimizer.step()
        found = penstock.compare(reference, tmp_path / name)
        assert re.search(r"value after the update, was not computed", str(found)), str(found)


def test_microbatches_and_processes_that_are_missing_are_said(reference: Path, tmp_path: Path):
    text = (reference / "process-00000.jsonl").read_text()
    lines = [line for line in text.splitlines(keepends=True) if not re.search(r'"at":\[\d,[012],[23],', line)]
    (tmp_path / "process-00000.jsonl").write_text("".join(lines).replace('"processes":1', '"processes":2', 1))
    found = penstock.compare(reference, tmp_path)
    assert any(note.endswith("only: microbatches 2, 3") for note in found.notes), found.notes
    assert found.incomplete == [f"{tmp_path} has no process-00001.jsonl of other processes of its run"]


def test_another_run_is_not_taken_for_the_reference_in_float64(reference: Path, tmp_path: Path):
    with pytest.raises(DataError, match="is not the reference in float64: it has none of its outputs"):
        penstock.compare(reference, reference, exact=reference)
    torch.manual_seed(1)
    other = type(make())().double()
    with penstock.record(tmp_path / "other", other, steps=1):
        accumulate(other, batch(0), 0)
    with pytest.raises(DataError, match=r"its outputs are .* of their norm away; record model\.double"):
        penstock.compare(reference, reference, exact=tmp_path / "other")


def test_a_wrong_update_of_a_small_learning_rate_is_named(tmp_path: Path):
    def train(name: str, **options: Any) -> Path:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-5, "weight_decay": 0.1, **options})
        with penstock.record(tmp_path / name, model):
            for step in range(2):
                optimizer.zero_grad()
                accumulate(model, batch(step), step)
                optimizer.step()
        return tmp_path / name

    right = train("right")
    for name, options, words in (
        ("decay", {"weight_decay": 0.0}, "value after the update, "),
        (
            "rate",
            {"lr": 1.2e-5},
            "value after the update, its update is 1.2 of the reference's (a factor of 6/5)",
        ),
        ("beta", {"betas": (0.9, 0.9)}, "step 1: .*, value after the update, "),
    ):
        found = penstock.compare(right, train(name, **options))
        assert re.search(words.replace("(a factor of 6/5)", r"\(a factor of 6/5\)"), str(found)), str(found)
        assert found.first is not None
        assert found.first.key.kind == files.Kind.PARAMETER


def test_other_weights_at_the_start_are_named(reference: Path, tmp_path: Path):
    model = make()
    with torch.no_grad():
        model.blocks[2].up.weight[3, 4] += 1.0
    with penstock.record(tmp_path / "run", model, steps=1):
        accumulate(model, batch(0), 0)
    found = penstock.compare(reference, tmp_path / "run")
    assert str(found).startswith("before the first step: blocks.2.up.weight, its value, only indices "), str(
        found
    )


def test_bad_recordings_are_named(reference: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"nothing has no recording; make one with penstock\.record"):
        penstock.compare(reference, tmp_path / "nothing")
    other = nn.Sequential(nn.Linear(2, 2))
    with penstock.record(tmp_path / "other", other, steps=1):
        other(torch.ones(1, 2))
    with pytest.raises(DataError, match="have no tensor in common: the first names are"):
        penstock.compare(reference, tmp_path / "other")
    text = (reference / "process-00000.jsonl").read_text()
    for name, content, message in (
        ("version", text.replace('{"recording":1', '{"recording":9', 1), "first line does not say"),
        ("json", text.replace('"digest"', '}{"digest"', 1), "is damaged: "),
        ("sizes", text.replace('"shape":[2,12,16]', '"shape":[-2,12,16]', 1), "are not sizes"),
        ("kind", text.replace('"at":[0,0,', '"at":[0,99,', 1), "99 is not a valid Kind"),
        ("long", text + "[" * (1 << 22), "is too long"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "process-00000.jsonl").write_text(content)
        with pytest.raises(DataError, match=message):
            penstock.compare(reference, tmp_path / name)


def test_a_recording_that_was_cut_off_is_compared_as_far_as_it_goes(reference: Path, tmp_path: Path):
    text = (reference / "process-00000.jsonl").read_text()
    (tmp_path / "process-00000.jsonl").write_text(text[: len(text) // 3])
    found = penstock.compare(reference, tmp_path)
    assert found.incomplete == [f"{tmp_path / 'process-00000.jsonl'} was cut off"]
    assert str(found).startswith("incomplete: ")
    assert found.same > 50
    assert not found.differences
    assert not found.good
    assert CliRunner().invoke(group, ["compare", str(reference), str(tmp_path)]).exit_code == 1
    with pytest.raises(RuntimeError, match="stop"), penstock.record(tmp_path / "failed", make()):
        raise RuntimeError("stop")
    assert files.read(tmp_path / "failed").cut_off == ["process-00000.jsonl"]


def test_the_recording_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "LIMIT", 20_000)
    with pytest.warns(RuntimeWarning, match="has 20,000 bytes and ends here; record fewer steps"):
        plain(tmp_path / "run")
    assert (tmp_path / "run" / "process-00000.jsonl").stat().st_size <= 20_000
    assert files.read(tmp_path / "run").cut_off


def test_what_is_around_the_first_difference_is_told(reference: Path, tmp_path: Path):
    def spoils(at: set[int]) -> Callable[[nn.Module, torch.Tensor, int], None]:
        def loop(model: nn.Module, ids: torch.Tensor, step: int) -> None:
            for n, part in enumerate(ids.chunk(MICROBATCHES)):
                with torch.no_grad():
                    model.blocks[2].up.bias.add_(float(n in at))
                (loss_of(model(part), part) / MICROBATCHES).backward()
                with torch.no_grad():
                    model.blocks[2].up.bias.sub_(float(n in at))

        return loop

    plain(tmp_path / "some", spoils({1, 3}))
    first = penstock.compare(reference, tmp_path / "some")
    assert first.around == [
        "before it, blocks.2.norm, output agrees",
        "it differs in 1, 3, counted from 0, of 4 microbatches",
    ]
    assert str(first).splitlines()[1] == "  " + "; ".join(first.around)
    assert re.fullmatch(
        r"  differ in all: \d+ of \d+ outputs, .*, \d+ of 52 gradients of parameters, .*",
        str(first).splitlines()[2],
    ), str(first)
    plain(tmp_path / "all", spoils({0, 1, 2, 3}))
    assert penstock.compare(reference, tmp_path / "all").around[1] == "it differs in all 4 microbatches"


def test_parameters_that_lack_the_same_are_named_together(reference: Path, tmp_path: Path):
    def loses(model: nn.Module, ids: torch.Tensor, step: int) -> None:
        for n, part in enumerate(ids.chunk(MICROBATCHES)):
            (loss_of(model(part), part) / MICROBATCHES).backward()
            if n == 0:
                model.blocks[1].zero_grad()

    plain(tmp_path / "run", loses)
    found = penstock.compare(reference, tmp_path / "run")
    assert found.first is not None
    assert "lacks what microbatch 0 gives" in found.first.what
    names = {f"blocks.1.{name}" for name, _ in make().blocks[1].named_parameters()}
    assert {found.first.key.name, *found.alike} == names
    assert found.around[-1].startswith("the same holds for blocks.1.")


def test_kept_values_tell_the_number_that_differs_most(tmp_path: Path):
    def recorded(name: str, change: float, tensors: str | None) -> Path:
        model = make()
        with torch.no_grad():
            model.blocks[2].up.weight[3, 5] += change
        with penstock.record(tmp_path / name, model, steps=1, tensors=tensors):
            accumulate(model, batch(0), 0)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        return tmp_path / name

    pattern = r"blocks\.2\..*"
    one, other = recorded("one", 0.0, pattern), recorded("other", 0.25, pattern)
    found = penstock.compare(one, other)
    value = make().blocks[2].up.weight[3, 5].item()
    words = f"; 1 of 512 numbers differ, most at [3, 5]: {value + 0.25:.6g}, and the reference's {value:.6g}"
    assert words in str(found)
    kept = {key.name for key, of in files.read(one).entries.items() if of[0].values is not None}
    assert kept == {name for name, _ in make().named_modules() if re.fullmatch(pattern, name)} | {
        name for name, _ in make().named_parameters() if re.fullmatch(pattern, name)
    }
    assert "numbers differ" not in str(penstock.compare(recorded("sums", 0.0, None), other))
    for path in (other / "process-00000").iterdir():
        path.write_bytes(b"{}")
    with pytest.raises(DataError, match=r"safetensors is damaged"):
        penstock.compare(one, other)


def test_the_page_of_an_incomplete_recording_still_begins_with_the_first_difference(
    reference: Path, tmp_path: Path
):
    plain(tmp_path / "run", wrong_count)
    path = tmp_path / "run" / "process-00000.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    page = tmp_path / "map.html"
    words = ["compare", str(reference), str(tmp_path / "run"), "--page", str(page)]
    output = CliRunner().invoke(group, words).output.splitlines()
    assert output[0].startswith("incomplete: ")
    assert output[1].startswith("step 1, microbatch 0: head, gradient of its output, is 0.5")
    text = page.read_text()
    assert text.index("head, gradient of its output, is 0.5") < text.index("was cut off")


def test_a_recording_of_the_model_in_the_place_of_its_pipeline_is_incomplete(reference: Path, tmp_path: Path):
    model = make()
    with (
        penstock.Pipeline(model, loss_of, ranks=2, microbatches=MICROBATCHES) as pipe,
        penstock.record(tmp_path / "run", model),
    ):
        optimizer = penstock.PipelineOptimizer(pipe, torch.optim.AdamW, lr=1e-2, clip=1.0)
        for step in range(2):
            pipe.step(batch(step), batch(step))
            optimizer.step()
            optimizer.zero_grad()
    found = penstock.compare(reference, tmp_path / "run")
    assert not found.good
    assert "has no output of a module; record what runs, such as the Pipeline" in found.incomplete[0]


def test_updates_with_other_bits_are_bounded_by_measurement_alone(reference: Path, tmp_path: Path):
    piped(tmp_path / "run", make(), schedule="gpipe", autocast=None, microbatches=2)
    plain(tmp_path / "exact", dtype=torch.float64)
    for exact in (None, tmp_path / "exact"):
        found = penstock.compare(reference, tmp_path / "run", exact=exact)
        assert any("updates have other bits, and without --exact" in note for note in found.notes) == (
            exact is None
            and found.first is None
            and any(v == "rounded" and k.kind == files.Kind.PARAMETER for k, v in found.verdicts.items())
        )


@pytest.mark.slow
def test_a_disk_that_refuses_ends_the_recording_and_not_the_training(tmp_path: Path):
    code = """
import resource, signal, warnings
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
from pathlib import Path
from tests.verify.loops import plain
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    plain(Path("run"))
print([str(w.message) for w in caught])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "process-00000.jsonl ends here, since it cannot be written: File too large" in done.stdout
    assert files.read(tmp_path / "run").cut_off


def test_compiled_modules_are_refused_by_name(tmp_path: Path):
    model = make()
    model.blocks[1].compile(backend="eager")
    with (
        pytest.raises(ConfigError, match=r"blocks\.1 is compiled.*record without torch\.compile"),
        penstock.record(tmp_path / "run", model),
    ):
        pass


def test_values_count_for_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "LIMIT", 200_000)
    model = make()
    with (
        pytest.warns(RuntimeWarning, match="ends here; record fewer steps, or keep fewer tensors"),
        penstock.record(tmp_path / "run", model, tensors=".*"),
    ):
        accumulate(model, batch(0), 0)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 300_000


@pytest.mark.parametrize("tensors", ["blocks.(", 3])
def test_tensors_must_be_a_regular_expression(tmp_path: Path, tensors: Any):
    with (
        pytest.raises(ConfigError, match="tensors must be a regular expression"),
        penstock.record(tmp_path / "run", make(), tensors=tensors),
    ):
        pass


def test_tensors_must_match_a_name(tmp_path: Path):
    with (
        pytest.raises(
            ConfigError,
            match=r"matches the whole name of no module or parameter; the first names are , blocks",
        ),
        penstock.record(tmp_path / "run", make(), tensors="block"),
    ):
        pass


def test_the_command_prints_the_first_and_ends_with_1(reference: Path, tmp_path: Path):
    plain(tmp_path / "run", wrong_count)
    words = ["compare", str(reference), str(tmp_path / "run")]
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 1
    assert re.match(
        r"step 1, microbatch 0: head, gradient of its output, is 0.5 of the reference's", done.output
    )
    of_microbatches = (
        "0 of 184 outputs, 92 of 184 gradients of outputs, 104 of 208 gradients from a microbatch"
    )
    assert done.output.splitlines()[1:] == [
        "  it differs in all 4 microbatches",
        f"  differ in all: {of_microbatches}, 26 of 52 gradients of parameters, 26 of 78 updated parameters",
    ]
    everything = CliRunner().invoke(group, [*words, "--all"]).output.splitlines()
    table = json.loads(CliRunner().invoke(group, [*words, "--json"]).output)
    assert len(everything) - 2 == len(table["differences"]) > 100
    assert table["differences"][0]["name"] == "head"
    assert (table["good"], table["rounded"]) == (False, 0)
    same = CliRunner().invoke(group, ["compare", str(reference), str(reference)])
    assert (same.exit_code, same.output) == (0, "706 tensors agree: all with the same bits\n")


def test_the_page_marks_the_first_difference_and_escapes_names(reference: Path, tmp_path: Path):
    plain(tmp_path / "run", left_out)
    page = tmp_path / "page.html"
    done = CliRunner().invoke(group, ["compare", str(reference), str(tmp_path / "run"), "--page", str(page)])
    assert done.exit_code == 1
    text = page.read_text()
    assert "lacks what microbatch 3 gives" in text
    (first,) = re.findall(r'<td class="different first">(\w+)</td>', text)
    assert first == "GU"
    assert text.count("<p>All 26 tensors have the same bits.</p>") == 1
    row, _ = re.findall(r"<tr><td>blocks.2.up.weight</td>(.*)</tr>", text)
    assert [look.split('"')[0] for look in row.split('class="')[1:]] == ["same"] * 4 + ["different first"]
    for name, value in (("one", 1.0), ("other", 2.0)):
        with penstock.record(tmp_path / name, make(), steps=1) as notes:
            notes.note("<script>alert(1)</script>", value)
    words = ["compare", str(tmp_path / "one"), str(tmp_path / "other"), "--page", str(page)]
    assert CliRunner().invoke(group, words).exit_code == 1
    assert "<td>&lt;script&gt;alert(1)&lt;/script&gt;</td>" in page.read_text()
