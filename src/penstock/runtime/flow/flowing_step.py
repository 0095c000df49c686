"""A training step that flows into the next one, from this rank's report to the verdict of all."""

from __future__ import annotations

from concurrent.futures import Future

from penstock.runtime.consensus import Losses
from penstock.runtime.flow.reports import RankReport, Verdict


class FlowingStep:
    """A training step that this rank has done, and maybe not the others.

    Attributes:
        number: number of the step.
        report: this rank's report.
        verdict: the verdict on the step; None while it is not known.
        updated: whether the update has been made, ahead or not.
        ahead: whether it was made before the verdict was known.
    """

    def __init__(self, number: int, report: RankReport, reports: Future[list[RankReport]]) -> None:
        self.number = number
        self.report = report
        self.verdict: Verdict | None = None
        self.updated = self.ahead = False
        self._reports = reports

    @property
    def reported(self) -> bool:
        """True if the reports of all ranks have arrived."""
        return self._reports.done()

    def reports(self, patience: float | None) -> list[RankReport]:
        """Wait for the reports of all ranks, for `patience` seconds or the timeout of every wait."""
        return self._reports.result(patience)

    def decide(self, verdict: Verdict) -> None:
        """Set the verdict, and drop the reports, which a result that is kept would keep."""
        self.verdict = verdict
        self.report = RankReport(Losses())
        self._reports = Future()
