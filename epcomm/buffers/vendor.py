"""The base of backends on vendor kernels: faults, traffic, the group.

Vendor kernels send no fault code. A rank with a fault takes part with ids of -1, and it alone
raises or records the fault for check(). With spec.compares_calls, one small all-gather per call
reports the fault to all ranks.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.buffers.base import Backend
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls import faults
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import any_flags, guard_ids
from epcomm.calls.header import ANY_BATCH, CallKind
from epcomm.calls.order import Calls
from epcomm.errors import BackendUnavailable, EPError, HandleError
from epcomm.protocol import BatchFlags, FaultCode
from epcomm.spec import BufferSpec

# Indices in the counted bytes.
DISPATCH, COMBINE = 0, 1


class VendorCalls(Backend):
    """The base of backends over a vendor package that implements the exchange."""

    needs_process_group: ClassVar[bool] = True

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        collectives = calls.collectives
        self._calls, self._collectives, self._spec = calls, collectives, spec
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._device = collectives.device
        self._is_closed = False
        self._faults = faults.DeviceFaults(collectives.names, collectives.device)
        # The fault word on the host. It is read after a host sync of the package, so it adds none.
        is_cuda = collectives.device.type == "cuda"
        self._fault_on_host = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        # Capacity in slots, for the message of check().
        self._max_slots = 0
        # The bytes are kept on the device, because reading a count of rows would need a host sync.
        self._sent_bytes = torch.zeros(3, dtype=torch.int64, device=self._device)

    def traffic(self) -> BufferTraffic:
        """Return the bytes sent to other ranks so far.   Host sync: yes."""
        dispatch, combine, control = self._sent_bytes.tolist()
        return BufferTraffic(dispatch_bytes=dispatch, combine_bytes=combine, control_bytes=control)

    def check(self) -> None:
        self._faults.check(self._max_slots)

    def close(self) -> None:
        """Free the memory. Collective if the package requires it. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._destroy()

    def abandon(self) -> None:
        self._is_closed = True

    @abstractmethod
    def _destroy(self) -> None:
        """Free the memory of the package. Collective if the package requires it."""

    @property
    def _num_experts(self) -> int:
        return self._spec.num_local_experts * self._world_size

    @property
    def _process_group(self) -> dist.ProcessGroup:
        group = self._collectives.process_group
        if group is None:
            raise BackendUnavailable(
                f"{self.name}: the EPGroup is not made of a torch.distributed process group "
                f"(rank {self._rank} of {self._world_size}); make it of one, or use another backend"
            )
        return group

    def _check_open(self) -> None:
        if self._is_closed:
            where = self._collectives.names.where
            raise HandleError(f"{self.name}: the buffer is closed ({where}); make a new EPGroup")

    def _guard(self, call: DispatchCall) -> tuple[Tensor, BatchFlags]:
        """Check top-k ids; return ids that are safe to send, and the flags of the batch.

        Call _raise_own() after the exchange to raise the fault of this rank.

        Host sync: one with compares_calls, else none.
        Raises:
            EPError: with compares_calls, the fault of some rank, on every rank.
        """
        ids, fault = self._guard_on_device(call)
        self._fault_on_host.copy_(fault, non_blocking=True)
        if not self._spec.compares_calls:
            return ids, faults.assume_all_need_grad(call.flags)
        flags = torch.tensor(int(call.flags), device=ids.device)
        values = self._gather_values(fault, flags).tolist()
        names = self._collectives.names
        codes, all_flags = [value[0] for value in values], [value[1] for value in values]
        faults.raise_faults(codes, names, self._own_error(call, codes[self._rank]))
        faults.check_gradients(all_flags, names, call.expert_names)
        return ids, any_flags(all_flags)

    def _guard_on_device(self, call: DispatchCall) -> tuple[Tensor, Tensor]:
        """Return ids that are safe to send, and the fault word for _record(). Host sync: none."""
        distinct = self.needs_distinct_ids
        return guard_ids(call.topk_ids, self._num_experts, call.error, distinct=distinct)

    def _raise_own(self, call: DispatchCall) -> None:
        """Raise this rank's own fault after an exchange in which the host has waited.

        Host sync: none. The fault was copied before the exchange was enqueued, and the package has
        read counts of that exchange.
        """
        error = self._own_error(call, int(self._fault_on_host))
        if error is not None:
            raise error

    def _own_error(self, call: DispatchCall, code: int) -> EPError | None:
        if call.error is not None or code == FaultCode.NONE:
            return call.error
        if code == FaultCode.REPEATED_IDS:
            return faults.repeated_ids_error(call.topk_ids, self._collectives.names)
        return faults.ids_error(call.topk_ids, self._num_experts, self._collectives.names)

    def _record(self, call: DispatchCall, fault: Tensor, required: Tensor | None = None) -> Tensor:
        """Record this rank's fault, or with compares_calls the faults of all ranks.

        required: int64 scalar, the slots that this rank needs; None: at most those that it has.
        Returns: bool scalar on the device: whether this call has a recorded fault.
        """
        own = (faults.pack_header(fault, call.flags), fault * 0 if required is None else required)
        if self._spec.compares_calls:
            values = self._gather_values(*own)
        else:
            # The faults of the other ranks are unknown; record none for them.
            header = faults.pack_header(torch.zeros_like(fault), call.flags).to(torch.int64)
            values = torch.stack([header, header * 0]).repeat(self._world_size, 1)
            values[self._rank] = torch.stack([value.to(torch.int64) for value in own])
        return self._faults.record(
            values[:, 0].to(torch.int32), values[:, 1] > self._max_slots, values[:, 1], call.error
        )

    def _gather_values(self, *values: Tensor) -> Tensor:
        """Gather `values` of all ranks, [W, number of values], int64, on the device."""
        mine = torch.stack([value.to(torch.int64) for value in values])
        self._sent_bytes[2] += mine.numel() * mine.itemsize * (self._world_size - 1)
        return self._collectives.all_gather(mine, phase="dispatch calls")

    def _count_bytes(self, kind: int, rows_to_rank: Tensor, row_bytes: int) -> None:
        """Count the bytes of the rows that this rank sends to other ranks.

        kind: DISPATCH or COMBINE.   rows_to_rank: number of rows for each rank, [W], on the device.
        """
        num_rows = rows_to_rank.sum() - rows_to_rank[self._rank]
        self._sent_bytes[kind] += num_rows * row_bytes

    def _compare_combine(self, error: EPError | None) -> None:
        """With compares_calls, raise on every rank if any rank has an error.

        Host sync: one with compares_calls, else none.
        """
        if not self._spec.compares_calls:
            return
        self._calls.announce(CallKind.COMBINE, ANY_BATCH, error=error)
