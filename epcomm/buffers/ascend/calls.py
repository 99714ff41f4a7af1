"""Probe and open the Ascend deep_ep, and count its bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.buffers.requirements import carrying_reasons, limit_reasons
from epcomm.buffers.sizes import CallShape
from epcomm.buffers.traffic import BufferTraffic
from epcomm.buffers.vendor import VendorCalls
from epcomm.calls.call import DispatchCall
from epcomm.errors import BackendUnavailable, describe_ranks, grouped
from epcomm.ops.slots import count_experts
from epcomm.platforms.ascend.chip import (
    DEVICE_NAMES,
    current_soc,
    device_name,
    is_torch_npu_imported,
)
from epcomm.platforms.ascend.environment import rounds_of
from epcomm.platforms.deep_ep import DeepEPKind, find_deep_ep, runs_on_cpu_ranks
from epcomm.platforms.deep_ep_package import import_deep_ep
from epcomm.platforms.machine import Machine, this_machine
from epcomm.platforms.signatures import signature_reasons
from epcomm.spec import Availability, BufferSpec
from epcomm.types import WireDtype

# Bytes of the id and weight of one (token, expert) pair, and of the scale of its row.
ENTRY_BYTES, SCALE_BYTES = 12, 4
# Requirements that no command can install.
NEEDS = "Ascend NPUs with their toolkit, torch_npu imported, and deep_ep of sgl-kernel-npu"


class AscendCalls(VendorCalls):
    """A backend over one Buffer of the package.

    calls: the names of the arguments that this backend passes to each method of the Buffer.
    """

    # The package quantises in its own kernels.
    takes_wire_tensors: ClassVar[bool] = False
    calls: ClassVar[Mapping[str, Sequence[str]]]
    # The package writes one slot for each (token, expert) pair.
    needs_distinct_ids: ClassVar[bool] = True
    # The Buffer of the package, which has no type stubs.
    _buffer: Any

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        found = machine.find_deep_ep()
        reasons = []
        if found is None:
            reasons.append("deep_ep for Ascend is not installed")
        elif found.kind is not DeepEPKind.ASCEND:
            reasons.append(f"the installed deep_ep is {found.kind.value}, expected Ascend")
        elif not found.is_stand_in and not is_torch_npu_imported():
            reasons.append("torch_npu is not imported; import it before epcomm plans")
        elif (device := device_name()) is not None and current_soc() is None:
            known = ", ".join(DEVICE_NAMES.values())
            reasons.append(f"the device is {device}, expected one of {known}")
        return Availability.judge(absent=reasons, needs=NEEDS)

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        out, combine_bytes = slot_bytes(spec)
        return BufferTraffic(
            dispatch_bytes=call.slots_sent * out, combine_bytes=call.slots_received * combine_bytes
        )

    def _open(self, process_group: dist.ProcessGroup, **arguments: object) -> None:
        """Construct the Buffer of the package if all ranks can.

        The environment is read again, because EPGroup.open_buffer may be called without a plan.
        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank cannot serve the specification; on every rank.
            ConfigError: ranks have different rounds.
        """
        (mode,), machine = self.modes, this_machine()
        reasons = [
            *self.probe(machine).reasons,
            *carrying_reasons(self._spec, self.caps(mode)),
            *limit_reasons(self._spec, self.caps(mode), mode),
            *self.lacks(mode, self._spec, self._world_size),
            *self.lacks_with(machine, self._spec, self._world_size),
        ]
        package: Any = None
        if not reasons:
            try:
                package = import_deep_ep()
                reasons += self._signature_reasons(package.Buffer)
            except BackendUnavailable as error:
                reasons.append(str(error))
        self._raise_reasons(reasons)
        self._calls.agree(_settings(machine.environment), what=self.name)
        self._buffer = package.Buffer(group=process_group, **arguments)

    def _signature_reasons(self, buffer: type) -> list[str]:
        return signature_reasons(buffer, self.calls)

    def _raise_reasons(self, reasons: Sequence[str]) -> None:
        """Raise on every rank if some rank has reasons."""
        mine = {"reasons": "; ".join(reasons)}
        records = enumerate(self._calls.gather_records(mine, phase="prepare"))
        ranks_of = grouped((record["reasons"], rank) for rank, record in records)
        faults = [f"{describe_ranks(ranks)}: {text}" for text, ranks in ranks_of.items() if text]
        if faults:
            raise BackendUnavailable(
                f"{self.name}: cannot be opened, {'; '.join(faults)} (this is rank {self._rank} of "
                f"{self._world_size})"
            )

    def _dummy(self, call: DispatchCall) -> DispatchCall:
        """Return a call of one token of ones with weights of 0; a row of zeros has no scale."""
        top_k, device = self._spec.top_k, call.topk_ids.device
        # Ranks begin at different experts, so that no expert gets the dummy tokens of all ranks.
        first = self._rank * self._spec.num_local_experts
        experts = torch.arange(first, first + top_k, device=device) % self._num_experts
        return replace(
            call,
            hidden_states=call.unquantized.new_ones(1, self._spec.hidden_size),
            topk_ids=experts.unsqueeze(0),
            topk_weights=torch.zeros(1, top_k, dtype=torch.float32, device=device),
        )

    def _destroy(self) -> None:
        """Drop the Buffer of the package; the HCCL window belongs to the process group."""
        self._buffer = None


def device_types() -> frozenset[str]:
    """Return the device types of groups that the package, or its imitation, serves."""
    found = find_deep_ep() if runs_on_cpu_ranks() else None
    is_imitated = found is not None and found.kind is DeepEPKind.ASCEND
    return frozenset({"cpu"} if is_imitated else {"npu"})


def slot_bytes(spec: BufferSpec) -> tuple[int, int]:
    """Return the bytes of one (token, expert) pair in dispatch and in combine."""
    scale_bytes = SCALE_BYTES if spec.dispatch_format.dtype is WireDtype.INT8 else 0
    wire = spec.dispatch_format.data_bytes(spec.hidden_size)
    return wire + scale_bytes + ENTRY_BYTES, 2 * spec.hidden_size


def slots_to_ranks(topk_ids: Tensor, num_experts: int, world_size: int) -> Tensor:
    """Count the (token, expert) pairs for each rank, [W], int64, on the device."""
    return count_experts(topk_ids, num_experts).view(world_size, -1).sum(1)


def _settings(variables: Mapping[str, str]) -> dict[str, str | int]:
    """Return the settings from variables and chip that must be equal on all ranks."""
    rounds = rounds_of(variables)
    return {
        "chip": str(current_soc()),
        "rounds": rounds.num_rounds,
        "tokens of a round": rounds.tokens_per_round,
        "rounds in combine": str(rounds.in_combine),
    }
