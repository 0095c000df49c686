"""Show the newest metrics of a run to Prometheus: in a text file, or at an endpoint on the loopback interface.

pip install prometheus-client
penstock train my.toml train.callbacks=to_prometheus:Prometheus     with this file in the current folder

The file is ``metrics.prom`` in the run's folder, for node_exporter's textfile collector. With PROMETHEUS_PORT=9100 in the
environment, it is ``http://127.0.0.1:9100/metrics`` instead.
"""

from __future__ import annotations

import os
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server, write_to_textfile

import penstock


class Prometheus(penstock.Callback):
    """Gauges ``penstock_train_loss``, ``penstock_held_out_held_out_bits``, ... labelled by run, and by rank for memory."""

    def on_start(self, event: penstock.StartEvent) -> None:
        self.gauges: dict[str, Gauge] = {}
        self.registry = CollectorRegistry()
        self.folder, self.server = event.folder, None
        if port := int(os.environ.get("PROMETHEUS_PORT", "0")):
            self.server, _ = start_http_server(port, addr="127.0.0.1", registry=self.registry)
        self.show("", running=1, step=event.step, steps=event.steps)

    def on_step(self, event: penstock.StepEvent) -> None:
        if event.logged:
            self.show("train_", **vars(event))
            self.show("", step=event.step)

    def on_evaluate(self, event: penstock.EvaluateEvent) -> None:
        self.show("held_out_", **vars(event))

    def on_end(self, event: penstock.EndEvent) -> None:
        self.show("", running=0)
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def show(self, kind: str, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, str | bool) or value is None or (kind and name == "step"):
                continue
            gauge = f"penstock_{kind}{name}"
            for rank, number in enumerate(value if isinstance(value, tuple) else [value]):
                labels = {"run": self.folder.name} | ({"rank": str(rank)} if isinstance(value, tuple) else {})
                if gauge not in self.gauges:
                    self.gauges[gauge] = Gauge(
                        gauge, gauge.replace("_", " "), list(labels), registry=self.registry
                    )
                self.gauges[gauge].labels(**labels).set(number)
        if self.server is None:
            write_to_textfile(str(self.folder / "metrics.prom"), self.registry)
