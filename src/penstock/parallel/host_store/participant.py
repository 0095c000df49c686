"""The part of a store in the steps of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from penstock.parallel.host_store.link import Link
from penstock.parallel.host_store.stored import StoredParameter
from penstock.parallel.participant import Participant, Step, StepFailure
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
        # Both directions of the link are used at once.
        self._in, self._out = Link(device), Link(device)
        self._begun = False
        # By stage, functions that wait for its values, and for its gradients to be at home.
        self._coming: dict[int, Callable[[], object]] = {}
        self._leaving: dict[int, Callable[[], object]] = {}
        storages = {each.storage for each in self}
        for s, module in modules.items():
            # A split backward's W runs without weights, so that I computes what needs them.
            module.released = lambda t: t.layout is torch.strided and t.untyped_storage()._cdata in storages
            if stored[s]:
                module.before = [partial(self.before, s)] * len(module.layers)

    def __iter__(self) -> Iterator[StoredParameter]:
        return (each for of_stage in self._stored.values() for each in of_stage)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights and gradients on the device now, within a step."""
        return sum(each.device_bytes for each in self)

    def begin(self, step: Step) -> None:
        self._begun = True
        self._in.open()
        self._out.open()
        for each in self:
            each.begin()

    def unshard(self, stage: int) -> None:
        absent = [each for each in self._stored[stage] if not each.resident]
        for each in absent:
            each.expect()
        self._coming[stage] = self._in.start([each.fetch for each in absent])

    def before(self, stage: int) -> None:
        # Later copies are not waited for: they run beside this op.
        if (wait := self._coming.pop(stage, None)) is not None:
            wait()

    def reshard(self, stage: int) -> None:
        for each in self._stored[stage]:
            each.drop()

    def before_gradients(self, stage: int) -> None:
        if (wait := self._leaving.get(stage)) is not None:
            wait()
        if returning := [each for each in self._stored[stage] if each.resume()]:
            self._in.start([each.bring_gradient for each in returning])()

    def reduce(self, stage: int) -> None:
        leaving = [each for each in self._stored[stage] if each.release_gradient()]
        self._leaving[stage] = self._out.start([each.send_gradient for each in leaving])

    def settle(self) -> None:
        for stage, wait in self._leaving.items():
            wait()
            for each in self._stored[stage]:
                each.settle()
        self._leaving.clear()

    def finish(self) -> None:
        self.settle()
        self._close()
        for each in self:
            each.require_unwritten()
        self._end(keeps=True)

    def abandon(self, failure: StepFailure) -> None:
        if self._begun:
            # Of a step that has run, some sums are of earlier steps and some are not.
            self._end(keeps=not failure.ran)

    def _end(self, keeps: bool) -> None:
        self._begun = False
        self._close()
        self._coming.clear()
        self._leaving.clear()
        for each in self:
            each.end(keeps)

    def _close(self) -> None:
        self._in.close()
        self._out.close()
