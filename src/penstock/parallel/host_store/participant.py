"""The part of a store in the steps of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from penstock.parallel.host_store.stored import StoredParameter
from penstock.parallel.participant import Participant, Step, StepFailure
from penstock.parallel.replicas.bucket import ReductionStream
from penstock.stage.module import StageModule


class StoreParticipant(Participant):
    """Weights of one rank that come from a store, and gradients that go there.

    Args:
        stored: by stage, parameters of that stage alone. Others are at home all the time.
    """

    def __init__(
        self,
        modules: Mapping[int, StageModule],
        stored: Mapping[int, Sequence[StoredParameter]],
        device: torch.device,
    ) -> None:
        self._stored = stored
        self._stream = ReductionStream(device)
        self._begun = False
        storages = {each.storage for each in self}
        for s, module in modules.items():
            # A split backward's W runs without weights, so that I computes what needs them.
            module.released = lambda t: t.layout is torch.strided and t.untyped_storage()._cdata in storages
            if self._stream.stream is not None and stored[s]:
                module.before = [self._stream.join] * len(module.layers)

    def __iter__(self) -> Iterator[StoredParameter]:
        return (each for of_stage in self._stored.values() for each in of_stage)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights and gradients on the device now, within a step."""
        return sum(each.device_bytes for each in self)

    def begin(self, step: Step) -> None:
        self._begun = True
        for each in self:
            each.begin()

    def unshard(self, stage: int) -> None:
        for each in self._stored[stage]:
            each.fetch(self._stream)

    def before(self, stage: int) -> None:
        self._stream.join()
        for each in self._stored[stage]:
            each.resume()

    def reshard(self, stage: int) -> None:
        for each in self._stored[stage]:
            each.drop()

    def reduce(self, stage: int) -> None:
        for each in self._stored[stage]:
            each.send_gradient(self._stream)

    def settle(self) -> None:
        for each in self:
            each.settle()

    def finish(self) -> None:
        if self._stream.stream is not None:
            self._stream.stream.synchronize()
        for each in self:
            each.require_unwritten()
        self._end(keeps=True)

    def abandon(self, failure: StepFailure) -> None:
        if self._begun:
            # Of a step that has run, some sums are of earlier steps and some are not.
            self._end(keeps=not failure.ran)

    def _end(self, keeps: bool) -> None:
        self._begun = False
        for each in self:
            each.end(keeps)
