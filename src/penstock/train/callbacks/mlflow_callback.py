"""Metrics, config and timelines for MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.train.callbacks.callback import Outcome, StartEvent
from penstock.train.callbacks.metrics_receiver import MetricsReceiver

if TYPE_CHECKING:
    import numpy as np

_FOLDER_TAG = "penstock.folder"
_MAX_PARAMETERS, _MAX_LETTERS = 100, 500  # of a request, and of a value in older stores
_STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow(MetricsReceiver):
    """A run of MLflow in the experiment ``penstock``; a resumed run continues it. Needs `penstock[mlflow]`.

    MLFLOW_TRACKING_URI names the store. Without it, the store is the folder ``mlruns`` in the run's folder, and nothing
    leaves the machine: MLflow's own reports of its use are turned off, too.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def on_start(self, event: StartEvent) -> None:
        store = os.environ.get("MLFLOW_TRACKING_URI")
        if not store:
            store = (event.folder / "mlruns").resolve().as_uri()
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            # Newer versions want a database for shared stores; this one has a single run.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=store)
        experiment = self._client.get_experiment_by_name("penstock")
        number = (
            self._client.create_experiment("penstock") if experiment is None else experiment.experiment_id
        )
        folder = str(event.folder.resolve())
        if event.step:
            same = f"tags.`{_FOLDER_TAG}` = '{folder}'"
            for run in [] if "'" in folder else self._client.search_runs([number], same, max_results=1):
                self._id = run.info.run_id
                self._client.set_terminated(self._id, "RUNNING")
                return
        tags = {_FOLDER_TAG: folder}
        self._id = self._client.create_run(number, run_name=event.folder.name, tags=tags).info.run_id
        self._log_config(event.config)

    def log(self, numbers: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_timeline(self, pixels: np.ndarray, step: int) -> None:
        picture = (pixels * 255).round().astype("uint8")
        self._client.log_image(self._id, picture, artifact_file=f"timeline/step-{step:06}.png")

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._id, _STATES[outcome])

    def _log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [
            Param(f"{section}.{key}", str(value)[:_MAX_LETTERS])
            for section, table in config.items()
            for key, value in table.items()
        ]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _MAX_PARAMETERS])
