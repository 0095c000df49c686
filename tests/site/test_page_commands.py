"""Every block of every page runs in a test, or is listed here with the reason why not; commands are valid all the same."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from penstock.cli import group
from penstock.schedule.families import build_schedule
from penstock.schedule.text import write_csv
from penstock.train.config.config import Config
from tests.support import tiny_run
from tests.support.documentation import DOCS, ROOT, Block, blocks, llama_3_8b, pages
from tests.support.lanes import exhaustive

FOLLOWED = {
    "find_the_wrong_tensor.md": "tests/pages/test_guides.py",
    "models.md": "tests/pages/test_guides.py",
    "planning.md": "tests/pages/test_guides.py",
    "training.md": "tests/pages/test_guides.py",
    "data.md": "tests/test_data_page.py",
    "own_schedule.md": "tests/pages/test_guides.py",
    "fine_tuning.md": "tests/huggingface/test_pages.py",
    "watching.md": "tests/test_watching_page.py",
    "huggingface.md": "tests/huggingface/test_pages.py",
    "start.md": "tests/pages/test_guides.py",
    "memory.md": "tests/pages/test_guides.py",
    "more_model_than_memory.md": "tests/pages/test_guides.py",
    "unlike_devices.md": "tests/pages/test_guides.py",
    "clusters.md": "tests/pages/test_guides.py",
    "which_parallelism.md": "tests/pages/test_guides.py",
    "troubleshooting.md": "tests/pages/test_guides.py",
    "coming_from/": "tests/pages/test_coming_from.py",
    "bench/RESULTS.md": "tests/bench/test_commands.py",
    "recipes/": "tests/recipes",
    "notebooks/": "tests/site/test_build.py",
    "AGENTS.md": "tests/test_agents_page.py",
}
"""Tests that follow a page, or the pages of a folder, from top to bottom."""
FOLLOWED_HERE = (
    *("checkpoints.md", "long_context.md", "operations.md", "parallelism.md", "planning.md"),
    *("reading_the_report.md", "reference/costs.md", "schedules.md"),
)
"""Pages whose commands run here, in this order, in one folder each."""
NOT_RUN = {
    "torchrun --nnodes": "needs several machines",
    "torchrun --nproc-per-node": "several processes of a launcher: tests/train and tests/runtime start these layouts",
    "srun": "needs Slurm: tests/recipes runs a job of it",
    "penstock checkpoint convert dcp": "what another program has trained on: tests/checkpoint/dcp converts back",
    "penstock plan my-model -c cluster.toml --from-run": "needs a measured cluster: see tests/cli/test_plan_run.py",
    "penstock doctor --ranks 8": "eight processes: tests/doctor runs fewer",
    "penstock doctor --measure": "measures until rates are steady: tests/doctor does it once",
    "torchrun --standalone": "four processes: tests/train/test_torchrun.py ends and restarts two",
    "from penstock import MeshShape": "eight processes: tests/parallel and tests/train run such meshes",
}
"""Begin of commands and code that no test runs as printed, with the reason."""
OF_OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages of the repository's root; their figures are checked by tests/bench/test_commands.py."""
SMALL = [
    "model.width=16", "model.layers=4", "model.heads=4", "model.hidden=24", "data.path=text", "data.sequence=12",
    "schedule.microbatches=4", "train.steps=2", "train.batch=8", "train.eval_batches=1", "sample.length=4",
]  # fmt: skip


def reason_not_to_run(text: str) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if text.startswith(start)), None)


def code(block: Block) -> list[str]:
    """What of a block has to run: its commands, or its Python."""
    return [block.text] if block.kind == "python" else block.commands


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks(page) if code(block)]


def follower(page: str) -> str | None:
    """The test that follows a page from top to bottom, or None."""
    return next((test for name, test in FOLLOWED.items() if page.startswith(name)), None)


def test_every_block_is_run_or_has_a_reason():
    offenders, texts = [], [text for block in all_blocks() for text in code(block)]
    assert [start for start in NOT_RUN if not any(text.startswith(start) for text in texts)] == []
    assert [test for test in FOLLOWED.values() if not (ROOT / test).exists()] == []
    for block in all_blocks():
        here = block.page in FOLLOWED_HERE and block.kind != "python"
        if block.page not in OF_OTHERS and not here and not follower(block.page):
            offenders += [f"{block.page}: {text}" for text in code(block) if not reason_not_to_run(text)]
    assert offenders == []


def words_of(command: str) -> list[str]:
    """Arguments of the penstock command in a command line."""
    words = shlex.split(command)
    return words[words.index("penstock") + 1 :]


def unknown_words(command: str) -> set[str]:
    """Return the subcommands, options and config keys of a command line that do not exist."""
    known: click.Command = group
    words = words_of(command)
    while isinstance(known, click.Group):
        with click.Context(known) as context:
            found = known.get_command(context, words[0])
        if found is None:
            return {words[0]}
        known, words = found, words[1:]
    options = {text for parameter in known.params for text in (*parameter.opts, *parameter.secondary_opts)}
    unknown = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - options
    sections = {field.name: getattr(Config(), field.name) for field in dataclasses.fields(Config)}
    for section, key in re.findall(r"^'?(\w+)\.(\w+)=", "\n".join(words), re.M):
        if key not in {field.name for field in dataclasses.fields(sections[section])}:
            unknown.add(f"{section}.{key}")
    return unknown


def test_options_and_keys_of_a_command_that_does_not_run_exist():
    every = {command for block in all_blocks() for command in block.commands if "penstock" in command}
    commands = set(filter(reason_not_to_run, every))
    assert len(commands) >= 10
    assert {command: unknown for command in commands if (unknown := unknown_words(command))} == {}


def test_a_word_that_does_not_exist_is_noticed():
    assert unknown_words("penstock trian my.toml") == {"trian"}
    assert unknown_words("penstock train my.toml --rank 2 train.step=3") == {"--rank", "train.step"}


def call(*words: str) -> None:
    """Run a command of penstock in this process."""
    done = CliRunner().invoke(group, list(words), catch_exceptions=False, env={"COLUMNS": "160"})
    assert done.exit_code == 0, f"penstock {shlex.join(words)}\n{done.output}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands of the pages name."""
    from tests.support import hf_folders

    root = tmp_path_factory.mktemp("pages")
    tiny_run.text_folder(root)
    hf_folders.of_bytes(root, max_position_embeddings=8192, num_hidden_layers=8).rename(root / "my-model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        torch.manual_seed(0)
        long = ("train.steps=100", "train.eval_every=50")
        call("train", *SMALL, "train.name=first", *long, "train.keep_last=0")
        for name, ranks in (("demo", 2), ("zb", 2), ("my-run", 4)):
            call("train", *SMALL, f"train.name={name}", f"parallel.pp={ranks}", "train.checkpoint_every=2")
        hf = [word for word in SMALL if not word.startswith("model.")]
        call("train", "model.path=my-model", *hf, "train.name=llama", *long)
        write_csv(build_schedule("zb-h1", 4, 16), "mine.csv")
        llama_3_8b(root)
        python = (block.text for block in blocks(DOCS / "planning.md") if block.kind == "python")
        profile = next(text for text in python if "profile.json" in text)
        exec(compile(profile, "planning.md", "exec"), {"__name__": "a_page"})
    (root / "my.toml").write_text((root / "runs" / "demo" / "config.toml").read_text())
    cluster = next(b.text for b in blocks(DOCS / "operations.md") if "[device]" in b.text)
    with_fp32 = re.sub(r"\{bf16 = (\S+)\}", r"{bf16 = \1, fp32 = 19e12}", cluster)
    (root / "cluster.toml").write_text(with_fp32)
    (root / "head.toml").write_text(next(b.text for b in blocks(DOCS / "schedules.md") if "F = [" in b.text))
    return root


# The searches of planning.md take the longest.
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [*(page for page in FOLLOWED_HERE if page != "planning.md"), *exhaustive("planning.md")]
)
def test_the_commands_of_a_page_run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    commands = [command for block in blocks(DOCS / page) for command in block.commands]
    runnable = [command for command in commands if reason_not_to_run(command) is None]
    assert runnable
    for number, command in enumerate(runnable):
        words = words_of(command)
        if words[0] == "train" and "--resume" in words:
            words += ["--set", f"train.steps={101 + number}"]
        elif words[0] == "train":  # of a size for tests, under a name of its own
            words += [*SMALL, f"train.name={page.removesuffix('.md')}-{number}"]
        call(*words)
