"""The dispatchers of both phases of one layer, as a plan chose them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epcomm.buffers.traffic import BufferTraffic
from epcomm.config import EPConfig, Mode
from epcomm.dispatchers.deepep_low_latency import DeepEPLowLatencyDispatcher
from epcomm.dispatchers.deepep_normal import DeepEPNormalDispatcher
from epcomm.dispatchers.dispatcher import RowsDispatcher
from epcomm.dispatchers.standard import StandardDispatcher
from epcomm.errors import ConfigError
from epcomm.group import EPGroup
from epcomm.planning.plan import EPPlan, PhasePlan
from epcomm.spec import MoESpec

# Of either layout, as the plan chose; runners read what they are given.
AnyDispatcher = RowsDispatcher[Any, Any]

_DISPATCHERS: Mapping[Mode, type[AnyDispatcher]] = {
    Mode.NORMAL: DeepEPNormalDispatcher,
    Mode.LOW_LATENCY: DeepEPLowLatencyDispatcher,
    Mode.STANDARD: StandardDispatcher,
}


class PhaseDispatchers:
    """One dispatcher for prefill and training, one for decode; they may be the same."""

    def __init__(self, group: EPGroup, spec: MoESpec, config: EPConfig, chosen: EPPlan) -> None:
        """Open what `chosen` names; it was planned with the same group, spec and config.

        Collective: yes.   Host sync: yes.
        """

        def open_phase(phase: PhasePlan) -> AnyDispatcher:
            return _DISPATCHERS[phase.mode](group, spec, config, chosen=phase)

        self._where = group.where
        self._decode_lacks = chosen.decode_lacks
        self.prefill = open_phase(chosen.prefill)
        self.decode: AnyDispatcher | None = self.prefill
        if chosen.decode is not chosen.prefill:
            self.decode = None if chosen.decode is None else open_phase(chosen.decode)

    def of_phase(self, *, decode: bool) -> AnyDispatcher:
        """The dispatcher of a phase.

        Raises:
            ConfigError: nothing serves decode; the message says what to set.
        """
        if not decode:
            return self.prefill
        if self.decode is None:
            raise ConfigError(
                f"ExpertParallelExperts: decode=True but there is no low latency "
                f"({self._where}); {self._decode_lacks}"
            )
        return self.decode

    def check(self) -> None:
        """Raise the faults that wait on the device. Local; host sync; see Dispatcher.check."""
        for dispatcher in self._all():
            dispatcher.check()

    def traffic(self) -> BufferTraffic:
        """Bytes sent by the buffers of both phases."""
        return sum((dispatcher.traffic() for dispatcher in self._all()), BufferTraffic())

    def _all(self) -> list[AnyDispatcher]:
        is_one = self.decode is None or self.decode is self.prefill
        return [self.prefill] if is_one else [self.prefill, *filter(None, [self.decode])]
