"""Send the metrics, the config and the timelines of a run to MLflow; a resumed run continues its record.

pip install mlflow-skinny matplotlib
penstock train my.toml train.callbacks=to_mlflow:MLflow     with this file in the current folder

MLFLOW_TRACKING_URI names the store. Without it, the store is the folder ``mlruns`` in the run's folder, and nothing leaves
the machine. With all of MLflow installed, ``mlflow ui --backend-store-uri RUN/mlruns`` shows it.
"""

from __future__ import annotations

import os

import penstock

FOLDER = "penstock.folder"
STATES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow(penstock.Callback):
    """A run of MLflow in the experiment ``penstock``."""

    def on_start(self, event: penstock.StartEvent) -> None:
        store = os.environ.get("MLFLOW_TRACKING_URI")
        if not store:
            store = (event.folder / "mlruns").resolve().as_uri()
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            # Newer versions want a database for shared stores; this one has a single run.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self.client = client = MlflowClient(tracking_uri=store)
        experiment = client.get_experiment_by_name("penstock")
        number = experiment.experiment_id if experiment else client.create_experiment("penstock")
        folder = str(event.folder.resolve())
        same = (
            client.search_runs([number], f'tags.`{FOLDER}` = "{folder}"', max_results=1) if event.step else []
        )
        if same:
            self.id = same[0].info.run_id
            client.set_terminated(self.id, "RUNNING")
            return
        self.id = client.create_run(number, run_name=event.folder.name, tags={FOLDER: folder}).info.run_id
        for section, table in event.config.items():
            for key, value in table.items():
                client.log_param(self.id, f"{section}.{key}", str(value)[:500])

    def on_step(self, event: penstock.StepEvent) -> None:
        if event.logged:
            self.log("train", event)

    def on_evaluate(self, event: penstock.EvaluateEvent) -> None:
        self.log("held_out", event)

    def on_trace(self, event: penstock.TraceEvent) -> None:
        import io

        from matplotlib.image import imread

        picture = (imread(io.BytesIO(event.picture)) * 255).round().astype("uint8")
        self.client.log_image(self.id, picture, artifact_file=f"timeline/step-{event.step:06}.png")

    def on_end(self, event: penstock.EndEvent) -> None:
        self.log("final", event)
        self.client.set_terminated(self.id, STATES[event.outcome])

    def log(self, kind: str, event: penstock.StepEvent | penstock.EvaluateEvent | penstock.EndEvent) -> None:
        for name, value in vars(event).items():
            if name in ("step", "logged") or isinstance(value, str) or value is None:
                continue
            for rank, number in enumerate(value if isinstance(value, tuple) else [value]):
                place = f"/rank_{rank}" if isinstance(value, tuple) else ""
                self.client.log_metric(self.id, f"{kind}/{name}{place}", number, step=event.step)
