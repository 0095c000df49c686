"""The recipe for Slurm, submitted to a Slurm on this machine: failures and the time limit do not change a run's numbers."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.checkpoint.find import is_whole
from penstock.train.config import file as config_file
from tests.support.slurm_cluster import SlurmCluster
from tests.support.tiny_run import text_folder
from tests.support.trainer import config_of, run, same
from tests.support.victim import PLAN

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "slurm" / "train.sbatch"
STEPS = 6

LAUNCH = """\
from penstock.runtime.start.launch_environment import find_launch, local_rank, local_size
launch = find_launch()
print("alone" if launch is None else (launch.rank, launch.size, local_rank(), local_size(), launch.url[:9]))
"""


class Site:
    """A cluster, with a folder that its nodes share.

    Attributes:
        cluster: the cluster.
        folder: the folder, with a config, a text and the runs.
    """

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.text = text_folder(folder)
        config = config_of(folder, self.text, "", STEPS, runtime={"threads": 1})
        (folder / "my.toml").write_text(config_file.dump(config))

    def sbatch(self, name: str, *options: str, config: str = "my.toml", **variables: str) -> str:
        """Submit the recipe as it is, and return the job's number."""
        sizes = ("--ntasks-per-node=1", "--cpus-per-task=1", "--time=60")
        command = ("sbatch", "--parsable", f"--job-name={name}", *sizes, *options, str(RECIPE), config)
        return self.cluster.run(*command, cwd=self.folder, RUNS=str(self.runs), **variables)

    def command(self, name: str, *lines: str) -> str:
        """Write a folder with a command ``penstock``, and return PATH with that folder first."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "penstock").write_text("\n".join(["#!/bin/bash", *lines, ""]))
        (folder / "penstock").chmod(0o755)
        return f"{folder}{os.pathsep}{self.cluster.environment['PATH']}"

    def output(self, name: str, job: str) -> str:
        return (self.folder / f"{name}-{job}.out").read_text()

    def checkpoint(self, name: str, step: int) -> Path:
        return self.runs / name / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    with SlurmCluster({"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}) as cluster:
        yield Site(cluster, tmp_path_factory.mktemp("site"))


class Jobs:
    """The jobs of all tests, submitted at once so that their waits overlap."""

    def __init__(self, site: Site) -> None:
        path = site.command(
            "victim",
            # Else Slurm would send SIGTERM to the second start of the job with the short limit, too.
            '[ -n "$SLURM_RESTART_COUNT" ] && scontrol update "jobid=$SLURM_JOB_ID" timelimit=60',
            f'exec {shlex.quote(sys.executable)} -m tests.support.victim "$@"',
        )
        blocked = ",".join(f"{{}}:{rank}:{{}}:until_asked" for rank in (0, 1))
        plan = f"0:1:3:kill,{blocked.format(1, 4, 1, 4)}"
        self.failing = site.sbatch("failing", "--nodelist=n[1,3]", PATH=path, **{PLAN: plan})
        plan = blocked.format(0, 3, 0, 3)
        self.limited = site.sbatch("limited", "--nodelist=n[1-2]", PATH=path, **{PLAN: plan})
        self.cancelled = site.sbatch("cancelled", "--nodelist=n[1-2]", PATH=path, **{PLAN: plan})
        self.wrong = site.sbatch("wrong", "--nodelist=n[1-2]", config="missing.toml", PATH=path)
        checkpoints = '"$RUNS/$SLURM_JOB_NAME/checkpoints/step-00000001"'
        save = (f"mkdir -p {checkpoints}", f"echo {{}} > {checkpoints}/manifest.json")
        failure = site.command("failure", *save, "exit 1")
        self.hopeless = site.sbatch("hopeless", "--nodelist=n[1-2]", PATH=failure, RETRIES="1")
        patient = site.command(
            "patient",
            "start=$RUNS/$SLURM_JOB_NAME-$SLURM_PROCID.${SLURM_RESTART_COUNT:-0}",
            "trap 'echo > $start.saved; exit 75' TERM",
            '[ "$SLURM_RESTART_COUNT" = 2 ] && exit 0',
            "echo > $start; while true; do sleep 0.1; done",
        )
        self.preempted = site.sbatch("preempted", "--partition=cheap", PATH=patient)
        nan = site.command("nan", "exit 3")
        broken = site.command("broken", "exit 1")
        self.once = site.sbatch("once", "--nodelist=n[1-2]", "--no-requeue", PATH=broken)
        self.nan = site.sbatch("nan", "--nodelist=n[1-2]", PATH=nan)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "SLURM_JOB_ID: is not set: submit this script with sbatch"),
        (
            {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "a", "RETRIES": "many"},
            "RETRIES must be a whole number, got 'many'",
        ),
    ],
)
def test_the_script_says_what_is_wrong_before_it_starts_anything(environment: dict[str, str], said: str):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    result = subprocess.run(["bash", RECIPE], env=inherited | environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert result.stderr.strip().endswith(said)


@pytest.fixture(scope="module")
def jobs(site: Site) -> Jobs:
    return Jobs(site)


@pytest.fixture(scope="module")
def undisturbed(site: Site, jobs: Jobs) -> Path:
    """The folder of the same run in this process alone, with ranks that are threads."""
    run(config_of(site.folder, site.text, "undisturbed", STEPS, runtime={"threads": 1}))
    return site.runs / "undisturbed"


@pytest.fixture(scope="module")
def limit_near(site: Site, jobs: Jobs) -> None:
    """Once the job is under way, bring its end so near that its last 120 s have begun; Slurm notices within 30 s."""
    site.cluster.until(lambda: is_whole(site.checkpoint("limited", 2)), "a checkpoint")
    minutes = int(site.cluster.job(jobs.limited)["RunTime"].split(":")[-2])
    site.cluster.run("scontrol", "update", f"jobid={jobs.limited}", f"timelimit={minutes + 2}")


@pytest.fixture(scope="module")
def node_lost(site: Site, jobs: Jobs) -> None:
    """Lose a node once the job whose rank was killed is under way again, and bring the node back."""
    cluster = site.cluster
    cluster.until(lambda: is_whole(site.checkpoint("failing", 4)), "a checkpoint of the second start", 150)
    cluster.kill_node("n3")
    cluster.run("scontrol", "update", "nodename=n3", "state=down", "reason=lost")
    cluster.until(lambda: cluster.job(jobs.failing)["Restarts"] == "2", "requeued by Slurm")
    cluster.start_node("n3")


@pytest.mark.usefixtures("limit_near")
def test_a_cancelled_job_saves_and_stays_cancelled(site: Site, jobs: Jobs):
    site.cluster.until(lambda: is_whole(site.checkpoint("cancelled", 2)), "a checkpoint")
    site.cluster.run("scancel", jobs.cancelled)
    job = site.cluster.ended(jobs.cancelled)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    saved = [site.checkpoint("cancelled", step) for step in (3, 4)]  # whichever step was under way
    site.cluster.until(lambda: any(map(is_whole, saved)), "the checkpoint of the stop")
    assert "requeue" not in site.output("cancelled", jobs.cancelled)


def test_a_job_that_may_not_be_requeued_fails_with_its_code(site: Site, jobs: Jobs):
    job = site.cluster.ended(jobs.once)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "0", "1:0")
    assert not list(site.runs.glob("once*"))


def test_bad_input_and_nans_are_not_requeued(site: Site, jobs: Jobs):
    wrong, nan = site.cluster.ended(jobs.wrong), site.cluster.ended(jobs.nan)
    assert (wrong["JobState"], wrong["Restarts"], wrong["ExitCode"]) == ("FAILED", "0", "2:0")
    assert "missing.toml" in site.output("wrong", jobs.wrong)
    assert (nan["JobState"], nan["Restarts"], nan["ExitCode"]) == ("FAILED", "0", "3:0")


def test_the_shapes_of_a_step_give_ranks_and_a_place_to_meet(site: Site):
    """Tasks of srun are ranks; a shell of salloc, a script of sbatch and a step of one task are one process."""

    def printed(*command: str) -> list[str]:
        return sorted(site.cluster.run(*command, sys.executable, "-c", LAUNCH).splitlines())

    nodes = "--nodelist=n[1-2]"
    ranks = ["(0, 2, 0, 1, 'tcp://n1:')", "(1, 2, 0, 1, 'tcp://n1:')"]
    assert printed("srun", nodes) == printed("salloc", nodes, "srun") == ranks
    assert printed("srun", "--ntasks=1") == printed("salloc", nodes) == ["alone"]
    three = [f"({place}, 'tcp://n1:')" for place in ("0, 3, 0, 2", "1, 3, 0, 1", "2, 3, 1, 2")]
    assert printed("srun", nodes, "--ntasks=3", "--distribution=cyclic") == three
    two = [f"({place}, 'tcp://127')" for place in ("0, 2, 0, 2", "1, 2, 1, 2")]
    assert printed("srun", "--nodes=1", "--ntasks=2") == two


def test_a_run_that_fails_at_every_start_is_requeued_only_so_often(site: Site, jobs: Jobs):
    """The first start brings a checkpoint, which does not count; the next two bring none, and one may."""
    job = site.cluster.ended(jobs.hopeless)
    assert (job["JobState"], job["Restarts"], job["ExitCode"]) == ("FAILED", "2", "1:0")
    lines = [line for line in site.output("hopeless", jobs.hopeless).splitlines() if "requeue" in line]
    told = ["asking for a requeue", "asking for a requeue", "not requeued"]
    assert [line.split(":")[0] for line in lines] == told
    assert lines[-1].endswith(f"1 requeue(s) in a row without a newer checkpoint in {site.runs / 'hopeless'}")


@pytest.mark.usefixtures("node_lost")
def test_preemption_and_requeue_by_hand_leave_time_to_save(site: Site, jobs: Jobs):
    def names(start: str) -> list[Path]:
        return [site.runs / f"preempted-{rank}.{start}" for rank in (0, 1)]

    def started(start: str) -> None:
        site.cluster.until(lambda: all(path.exists() for path in names(start)), f"start {start}")

    started("0")
    urgent = ("--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=true")
    site.cluster.ended(site.cluster.run("sbatch", "--parsable", *urgent))
    started("1")
    site.cluster.run("scontrol", "requeue", jobs.preempted)
    job = site.cluster.ended(jobs.preempted)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "2")
    assert all(path.exists() for path in (*names("0.saved"), *names("1.saved")))


@pytest.mark.usefixtures("node_lost")
def test_a_killed_rank_and_a_lost_node_change_nothing_in_the_run(site: Site, jobs: Jobs, undisturbed: Path):
    job = site.cluster.ended(jobs.failing)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "2"), site.output("failing", jobs.failing)
    assert "asking for a requeue: exit code 137" in site.output("failing", jobs.failing)
    same(site.runs / "failing", undisturbed)
    assert "srun: error: n3: task 1: Killed" in site.output("failing", jobs.failing)
    assert not list(site.runs.glob(f"*-{jobs.failing}.requeues"))


@pytest.mark.usefixtures("limit_near")
def test_the_time_limit_becomes_a_checkpoint_and_a_requeue(site: Site, jobs: Jobs, undisturbed: Path):
    job = site.cluster.ended(jobs.limited)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), site.output("limited", jobs.limited)
    assert "asking for a requeue: exit code 75" in site.output("limited", jobs.limited)
    same(site.runs / "limited", undisturbed)
