"""``penstock train`` under launchers: torchrun restarts a failed run, which continues from its newest checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lanes import exhaustive
from tests.support.programs import program
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, run, same
from tests.support.victim import started


@pytest.mark.slow
def test_a_run_under_torchrun_goes_on_by_itself_and_sigterm_saves_it(tmp_path: Path):
    text = text_folder(tmp_path)
    run(config_of(tmp_path, text, "once", 6, runtime={"threads": 1}))
    config = config_of(tmp_path, text, "again", 6, runtime={"threads": 1})
    launcher = (*TORCHRUN, "--max-restarts=1")
    done = started(config, "0:0:3:kill,1:1:4:term", *launcher, words=("--resume",))
    folder = tmp_path / "runs" / "again"
    assert done.returncode == 1, done.stderr  # torchrun's own, of whatever its processes end with
    assert f"stopped after step 5, saved in {folder / 'checkpoints' / 'step-00000005'}" in done.stdout
    run(config_of(tmp_path, text, "again", 6, str(folder), runtime={"threads": 1}))
    same(folder, tmp_path / "runs" / "once")


PENSTOCK = (sys.executable, "-m", "penstock", "train")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        (*TORCHRUN, *PENSTOCK[1:]),
        *exhaustive(((*MPIRUN, *PENSTOCK),)),
    ],
    ids=["torchrun", "mpirun"],
)
def test_resuming_a_finished_run_ends_well_under_every_launcher(tmp_path: Path, command: tuple[str, ...]):
    if command[0] == MPIRUN[0]:
        program(MPIRUN[0], package="openmpi-bin")
    config = config_of(tmp_path, text_folder(tmp_path), "once", 2, runtime={"threads": 1})
    run(config)
    folder = tmp_path / "runs" / "once"
    kept = (folder / "metrics.jsonl").read_bytes()
    (folder / "sample.txt").unlink()
    words = [*command, "--resume", str(folder)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (folder / "sample.txt").is_file()
    assert (folder / "metrics.jsonl").read_bytes() == kept
