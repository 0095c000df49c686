"""The distribution of tests to workers, a file at a time, which outlives a worker that ends in the middle of a test."""

from __future__ import annotations

from contextlib import suppress

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class CrashSafeScheduling(LoadFileScheduling):
    """As ``--dist loadfile``; a test that ends its worker fails by name, and all others still run.

    xdist 3.8 hands out each file that the lost worker ever had, also those whose tests are all done. Such a file gives no
    tests to a worker, so it never asks for more, and once every worker holds one of these, the session waits for ever. It
    also runs the test that ended the worker once more, on the next.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Put back the files that a worker has not finished, without the test it was at, and return that test's name."""
        left = _unfinished(self.assigned_work.pop(node))
        if not left:
            return None
        tests = next(iter(left.values()))
        crashed = next(name for name, done in tests.items() if not done)
        tests[crashed] = True
        self.workqueue.update(_unfinished(left))
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker files until it has two tests, since it runs none before it knows what comes next."""
        # Where two workers ended, xdist gives files to both that replace them once one of these has found its tests.
        if node not in self.registered_collections:
            return
        # A worker that has ended takes nothing. The session hears of it next, and `remove_node` puts back what it was given.
        with suppress(OSError):
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)


def _unfinished(files: dict[str, dict[str, bool]]) -> dict[str, dict[str, bool]]:
    return {file: tests for file, tests in files.items() if not all(tests.values())}
