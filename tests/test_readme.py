"""README and docs are short, both sides of the README's diffs give the same numbers; its figures are the results'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from bench.readme_picture import steps
from tools.house import words
from torch import nn

import penstock

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "bench" / "RESULTS.md").read_text()
LOOP, TRAINER = re.findall(r"^```diff\n(.*?)^```", README, re.S | re.M)


def side(diff: str, mark: str) -> str:
    """Return the program before ("-") or after ("+") a diff."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in (" ", mark))


def changed(diff: str) -> int:
    """Return the lines that a diff adds."""
    return sum(line.startswith("+") for line in diff.splitlines())


def after_the_loop(mark: str) -> list[torch.Tensor]:
    """Return the parameters of a small model after one side of the loop's diff."""
    torch.manual_seed(0)
    names = {
        "model": nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]).double(),
        "batches": [(torch.randn(32, 64).double(), torch.randn(32, 64).double()) for _ in range(2)],
        "loss_fn": nn.functional.mse_loss,
        "penstock": penstock,
        "AdamW": torch.optim.AdamW,
    }
    exec(compile(side(LOOP, mark), "README.md", "exec"), names)
    if mark == "+":
        names["pipe"].close()
    return list(names["model"].parameters())


def test_a_loop_of_ones_own_trains_the_same_weights_after_at_most_five_lines():
    assert 3 <= changed(LOOP) <= 5
    pairs = zip(after_the_loop("-"), after_the_loop("+"), strict=True)
    # Plain PyTorch takes the batch at once, and AdamW divides what is left of rounding by its size.
    assert all(torch.allclose(ours, theirs, rtol=0, atol=1e-9) for ours, theirs in pairs)


def after_the_trainer(mark: str, folder: Path) -> list[torch.Tensor]:
    """Return the parameters of a small Llama after one side of the trainer's diff."""
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=4))
    off = {"report_to": [], "dataloader_pin_memory": False, "save_strategy": "no", "disable_tqdm": True}
    sgd = {"optim": "sgd", "learning_rate": 0.1}  # AdamW divides what is left of rounding by its size
    batch = {"max_steps": 2, "per_device_train_batch_size": 8, "use_cpu": True}
    names = {
        "model": model,
        "args": transformers.TrainingArguments(str(folder), **off, **sgd, **batch),
        "rows": [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (16, 12))],
        "Trainer": transformers.Trainer,
        "PipelineTrainer": penstock.PipelineTrainer,
    }
    exec(compile(side(TRAINER, mark), "README.md", "exec"), names)
    return list(model.parameters())


@pytest.mark.slow
def test_a_trainer_trains_the_same_weights_after_at_most_five_lines(tmp_path: Path):
    assert changed(TRAINER) <= 5
    pairs = zip(after_the_trainer("-", tmp_path / "a"), after_the_trainer("+", tmp_path / "b"), strict=True)
    assert all(torch.allclose(ours, theirs, rtol=0, atol=1e-5) for ours, theirs in pairs)


def test_it_has_at_most_600_words_and_what_it_names_is_there():
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()] == []
    commands = re.findall(r"^    make (\w+) ", README, re.M)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{command}:", makefile, re.M) for command in commands)
    assert len(README.split()) <= 600


def test_pages_of_docs_that_no_command_writes_have_at_most_34_000_words():
    pages = words()
    assert len(pages) > 30
    assert sum(pages.values()) <= 34_000, "python -m tools.house --files prints the words of each page"


@pytest.mark.parametrize(
    "page", ["README.md", "docs/start.md", "docs/which_parallelism.md", "docs/huggingface.md"]
)
def test_other_axes_and_fine_tuning_are_one_click_away(page: str):
    text = (ROOT / page).read_text()
    for target in (
        "experts.md", "long_context.md", "parallelism.md#sharding-over-replicas", "fine_tuning.md",
        "fine_tuning.md#qlora-on-two-cards",
    ):  # fmt: skip
        anchor = "" if "#" in target else r"(#[\w-]+)?"
        linked = rf"\]\((docs/)?{re.escape(target)}{anchor}\)"
        assert re.search(linked, text), f"{page} has no link to {target}"


def section(heading: str) -> str:
    """Return a section of the results."""
    (found,) = re.findall(rf"^## {heading}$.*?(?=^## |\Z)", RESULTS, re.S | re.M)
    return found


def test_its_figures_are_those_of_the_results():
    rows = re.findall(r"^\| (.+) \| `(bench\.\w+)` \|$", README, re.M)
    assert len(rows) >= 8
    for text, command in rows:
        *_, figures = text.split(" | ", 1)
        of_cpus = section(rf"python -m {re.escape(command)}")
        on_cpus, _, on_gpu = figures.partition(" | ")
        for figure, source in ((on_cpus, of_cpus), (on_gpu, section("On one GPU"))):
            for number in re.findall(r"[\d.]+(?:e-\d+)?", figure):
                # Sections print some shares with blanks before their unit, and medians in the summary.
                found = re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", source)
                assert found, f"{number} of {command} is not in its section of the results"
    claim = r"of ([\d,]+) random models .*, (\d+) trained with plain PyTorch's bits, (\d+) within.* (\d+) were refused"
    ((every, *counts),) = re.findall(claim, " ".join(README.split()))
    equal, bounded, refused = counts
    assert (
        f"{every.replace(',', '')} cases: {equal} bit-equal, {bounded} bounded, {refused} refused, 0 FAILED"
        in RESULTS
    )


def test_its_bubbles_are_those_of_the_picture_and_the_picture_is_drawn_from_these_steps():
    shown = [f"{step.bubble:.0%}" for step in steps()]
    assert re.findall(r"One step of four ranks: (.*), (.*) and (.*) bubble", README) == [tuple(shown)]
    picture = (ROOT / "docs" / "_static" / "timeline.svg").read_text()
    for step in steps():
        assert f"{step.title}: {step.units:g} units, bubble {step.bubble:.0%}" in picture
    four, sixteen = (f"{3 / (microbatches + 3):.0%}" for microbatches in (4, 16))
    assert f"four ranks idles {four} with four, {sixteen} with sixteen" in README
