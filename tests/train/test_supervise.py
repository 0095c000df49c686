"""``penstock train --restarts``: a failed run restarts from the newest checkpoint, and leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.base.errors import ConfigError, PeerError, PenstockError
from penstock.base.run_lock import locked
from penstock.checkpoint.find import is_whole
from penstock.cli import group
from penstock.train import supervise as launch
from penstock.train.config.config import Config
from penstock.train.signals import ERROR_FILE, ExitCode, record_failure
from penstock.train.supervise import supervise
from tests.support.lanes import exhaustive
from tests.support.programs import program
from tests.support.tiny_run import text_folder, tiny
from tests.support.trainer import config_of, run, same
from tests.support.victim import NOTES, PLAN, started
from tests.support.waiting import until

VICTIM = (sys.executable, "-m", "tests.support.victim", "train")


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_sigterm_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = text_folder(tmp_path)
    run(config_of(tmp_path, text, "once", 6, runtime={"threads": 1}))
    monkeypatch.setenv(PLAN, "0:1:3:kill,0:0:1:note_addresses,0:1:1:note_addresses,1:1:4:term")
    monkeypatch.setenv(NOTES, str(tmp_path))
    said: list[str] = []
    config = config_of(tmp_path, text, "again", 6, runtime={"threads": 1})
    assert supervise(config, restarts=1, command=VICTIM, say=said.append) == ExitCode.STOPPED
    assert said[0] == "rank 1 failed first: killed by SIGKILL"
    assert said[1].startswith("restart 1 of 1 without a newer checkpoint; ")
    assert len(said) == 2
    folder = tmp_path / "runs" / "again"
    addresses = " ".join((tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)).split()
    assert all(ip_address(address).is_loopback for address in addresses), addresses
    assert is_whole(folder / "checkpoints" / "step-00000005")
    run(config_of(tmp_path, text, "again", 6, str(folder), runtime={"threads": 1}))
    same(folder, tmp_path / "runs" / "once")


@pytest.mark.slow
def test_a_signal_to_the_launcher_and_its_ranks_together_is_one_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(PLAN, "0:0:2:term_all,0:1:2:term_all")
    said: list[str] = []
    config = config_of(tmp_path, text_folder(tmp_path), "all", 6, runtime={"threads": 1})
    assert supervise(config, restarts=1, command=VICTIM, say=said.append) == ExitCode.STOPPED
    assert said == []
    assert is_whole(tmp_path / "runs" / "all" / "checkpoints" / "step-00000003")


def script(*lines: str) -> tuple[str, ...]:
    """Return a command for processes that start at once."""
    return ("/bin/sh", "-c", "\n".join(lines))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return tiny(tmp_path, text_folder(tmp_path))


def test_what_fails_at_every_start_is_given_up(tmp_path: Path, config: Config):
    said: list[str] = []
    starts = tmp_path / "starts"
    command = script(f"echo $TORCHELASTIC_RESTART_COUNT$RANK >> {starts}", "exit 1")
    assert supervise(config, restarts=2, command=command, say=said.append) == ExitCode.GAVE_UP
    # A rank may be ended before it has written, since the other one has failed.
    assert {start[0] for start in starts.read_text().split()} == {"0", "1", "2"}
    assert [line for line in said if "failed first" not in line] == [
        "restart 1 of 2 without a newer checkpoint; there is none yet",
        "restart 2 of 2 without a newer checkpoint; there is none yet",
        f"gave up: 2 restart(s) in a row without a newer checkpoint in {tmp_path / 'runs' / 'tiny' / 'checkpoints'}",
    ]
    assert supervise(config, restarts=0, command=command, say=said.append) == ExitCode.FAILED


@pytest.mark.parametrize("code", [ExitCode.BAD_INPUT, ExitCode.NOT_FINITE, ExitCode.STOPPED, ExitCode.DONE])
def test_what_another_start_would_not_change_ends_it(config: Config, code: ExitCode):
    assert supervise(config, restarts=3, command=script(f"exit {int(code)}"), say=print) == code


def test_newer_checkpoints_make_the_restarts_count_anew(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
):
    """Each start fails, and all but the last three save a newer checkpoint first."""
    said: list[str] = []
    command = script(
        "[ $RANK = 0 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 3 ] &&",
        f"mkdir -p {tmp_path / 'runs' / 'tiny' / 'checkpoints'}/step-0000000$((TORCHELASTIC_RESTART_COUNT + 1))",
        "exit 1",
    )
    monkeypatch.setattr(launch, "is_whole", Path.is_dir)
    assert supervise(config, restarts=2, command=command, say=said.append) == ExitCode.GAVE_UP
    assert [line.split()[1] for line in said if line.startswith("restart ")] == ["1", "1", "1", "2"]


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what ranks report: the error of a rank, and that of one that waited for it."""
    for name, error in (("own", PenstockError("the disk is gone")), ("peer", PeerError("rank 1 has ended"))):
        monkeypatch.setenv(ERROR_FILE, str(tmp_path / name))
        record_failure(error)
    monkeypatch.delenv(ERROR_FILE)
    return tmp_path


def test_the_first_failure_is_told_and_a_stopped_process_is_killed(
    reports: Path, config: Config, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "GRACE", 0.3)
    said: list[str] = []
    pid = reports / "pid"
    command = script(
        f"[ $RANK = 0 ] && echo $$ > {pid}.making && mv {pid}.making {pid} && kill -STOP $$",
        f"while [ ! -e {pid} ]; do sleep 0.01; done",
        f"cp {reports / 'own'} $TORCHELASTIC_ERROR_FILE",
        "exit 1",
    )
    assert supervise(config, restarts=0, command=command, say=said.append) == ExitCode.FAILED
    assert said == ["rank 1 failed first: PenstockError: the disk is gone"]
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_the_error_of_a_rank_is_told_and_not_that_of_one_that_waited_for_it(reports: Path, config: Config):
    said: list[str] = []
    command = script(
        "[ $RANK = 0 ] && report=peer || report=own",
        f"cp {reports}/$report $TORCHELASTIC_ERROR_FILE",
        "exit 1",
    )
    assert supervise(config, restarts=0, command=command, say=said.append) == ExitCode.FAILED
    assert said == ["rank 1 failed first: PenstockError: the disk is gone"]
    said.clear()
    assert supervise(config, restarts=0, command=script("kill -9 $$"), say=said.append) == ExitCode.FAILED
    assert said == ["rank 0 failed first: killed by SIGKILL"]


@pytest.mark.slow
def test_with_the_launcher_its_processes_end(tmp_path: Path, config: Config):
    """Whatever ends the launcher, and even if they are stopped."""
    names = [tmp_path / "pid-0", tmp_path / "pid-1"]
    child = [
        "import os, signal",
        "from penstock.train.signals import follow_launcher",
        "follow_launcher()",
        f"path = {str(tmp_path)!r} + '/pid-' + os.environ['RANK']",
        "open(path + '.making', 'w').write(str(os.getpid()))",
        "os.rename(path + '.making', path)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ]
    command = (sys.executable, "-c", "\n".join(child))
    lines = [
        "from penstock.train.config.config import Config",
        "from penstock.train.supervise import supervise",
        f"supervise(Config(), restarts=0, command={command!r})",
    ]
    with subprocess.Popen([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path) as launcher:
        until(lambda: all(name.exists() for name in names))
        launcher.kill()
    until(lambda: not any(runs(int(name.read_text())) for name in names))


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_folder_in_use_starts_nothing_and_what_was_never_begun_leaves_nothing(
    config: Config, tmp_path: Path
):
    run = tmp_path / "runs" / "tiny"
    with locked(run, say=pytest.fail), pytest.raises(ConfigError, match="in use by process"):
        supervise(config, restarts=3, command=("/nowhere",))
    assert not run.parent.exists()
    assert supervise(config, restarts=3, command=script("exit 2"), say=print) == ExitCode.BAD_INPUT
    assert not run.parent.exists()


def test_bad_input_starts_nothing(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already exists"):
        supervise(config, restarts=3, command=("/nowhere",))
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(group, ["train", "--restarts", "3"])
    assert result.exit_code == 2
    assert "--restarts starts the processes itself" in result.output


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
        *exhaustive(((*PENSTOCK, "--restarts", "1"),), ((*MPIRUN, *PENSTOCK),)),
    ],
    ids=["torchrun", "restarts", "mpirun"],
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
