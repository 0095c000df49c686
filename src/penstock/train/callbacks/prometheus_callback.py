"""Metrics for Prometheus: a text file, or an endpoint on the loopback interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.train.callbacks.callback import (
    Callback,
    EndEvent,
    EvaluateEvent,
    StartEvent,
    StepEvent,
    values_of,
)

FILE = "metrics.prom"


class Prometheus(Callback):
    """Gauges ``penstock_train_loss``, ``penstock_held_out_held_out_bits``, ... of the last line of metrics.

    Needs `penstock[prometheus-client]`. Every gauge has the label ``run``, and those of memory have ``rank``.
    ``penstock_running`` is 1 until the run ends.

    Args:
        port: port of ``http://127.0.0.1:PORT/metrics``; 0 (default) writes the file ``metrics.prom`` in the run's folder
            instead, for node_exporter's textfile collector.
    """

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._gauges: dict[str, Any] = {}
        self._registry: Any = None
        self._server: Any = None
        self._file = Path()
        self._run = ""

    def on_start(self, event: StartEvent) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry, self._file, self._run = CollectorRegistry(), event.folder / FILE, event.folder.name
        if self.port:
            try:
                self._server, _ = start_http_server(self.port, addr="127.0.0.1", registry=self._registry)
            except OSError as error:
                raise ConfigError(
                    f"cannot serve metrics on port {self.port} (train.prometheus_port): {error.strerror}; give a free port"
                ) from error
        self._set("running", 1)
        self._set("step", event.step)
        self._set("steps", event.steps)
        self._write()

    def on_step(self, event: StepEvent) -> None:
        if event.logged:
            self._add("train", event)

    def on_evaluate(self, event: EvaluateEvent) -> None:
        self._add("held_out", event)

    def on_end(self, event: EndEvent) -> None:
        self._set("running", 0)
        self._write()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _add(self, kind: str, event: StepEvent | EvaluateEvent) -> None:
        self._set("step", event.step)
        for name, value in values_of(event).items():
            if isinstance(value, list):
                for rank, each in enumerate(value):
                    self._set(f"{kind}_{name}", each, rank)
            elif name != "step":
                self._set(f"{kind}_{name}", value)
        self._write()

    def _set(self, name: str, value: float, rank: int | None = None) -> None:
        from prometheus_client import Gauge

        labels = {"run": self._run} | ({} if rank is None else {"rank": str(rank)})
        if name not in self._gauges:
            text = f"{name.replace('_', ' ')}; see docs/watching.md"
            self._gauges[name] = Gauge(f"penstock_{name}", text, list(labels), registry=self._registry)
        self._gauges[name].labels(**labels).set(value)

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        if not self.port:
            write_to_textfile(str(self._file), self._registry)
