"""The contract of a dispatcher: dispatch a batch, combine its results, report every fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from torch import Tensor

from epcomm.records import CombineInput, DispatchOutput, Pending, TopKOutput
from epcomm.types import WireTensor

DispatchT = TypeVar("DispatchT", bound=DispatchOutput)
CombineT = TypeVar("CombineT", bound=CombineInput)

# Whether the expert weights of a rank will receive gradients: one answer, or one for each name.
NeedGrad = bool | Mapping[str, bool]


class Dispatcher(ABC, Generic[DispatchT, CombineT]):
    """Moves the tokens of one layer to their experts and the results back.

    A dispatcher keeps no state of a batch, so batches may interleave: without gradients up to
    BufferCaps.batches_in_flight, with gradients any number.
    """

    @abstractmethod
    def dispatch(
        self,
        hidden_states: Tensor | WireTensor,
        topk: TopKOutput,
        *,
        experts_need_grad: NeedGrad = False,
    ) -> DispatchT:
        """Send each token to the ranks that own its experts.

        Args:
            hidden_states: [T, H], T <= M, T = 0 is legal; in the dtype given at construction, or in
                another floating dtype, which is cast and is the dtype of y. Or quantised rows in
                the dispatch format of the plan, with scales of any layout and strides: they are
                sent unchanged, have no gradients, and y has the dtype given at construction.
            topk: topk_ids [T, K], int64, physical expert ids, -1 for none; topk_weights [T, K],
                float32, or another floating dtype, which is cast.
            experts_need_grad: whether this rank's expert weights will receive gradients, so that
                the backward of combine runs even if no input needs gradients; or one answer for
                each name, with equal names, order and answers on all ranks.

        Collective: all ranks of the group; T may differ.
        Host sync, graph capture, lifetime of rows: see BufferCaps of the buffer.
        Raises:
            ShapeError: a tensor of some rank is invalid; on every rank, before rows are sent.
            CapacityError: T > M on some rank; on every rank.
            ConfigError: some ranks need gradients while others run under torch.no_grad(), pass
                quantised rows, or train different expert weights.
            HandleError: the dispatcher is closed.
            EPTimeout: other ranks did not arrive in time; the group is unusable, close() returns.
        On a static buffer only check() raises the first three.
        """

    @abstractmethod
    def combine(self, combine_input: CombineT) -> Tensor:
        """Return the results to the ranks of their tokens and sum them: y [T, H].

        y has the dtype of the hidden states as the caller passed them.

        Collective: all ranks that dispatched this batch.   Host sync: none on a device.
        Lifetime: the caller owns the result.
        Raises:
            HandleError: the batch was combined before, belongs to another dispatcher, or the
                dispatcher is closed.
            ShapeError: the rows do not match the batch.
            EPTimeout: as in dispatch.
        The first two are raised on every rank, before rows are sent, and the batch may then be
        combined again. On a static buffer only the rank with the error raises; y is NaN on the
        other ranks, and their check() raises. On NCCL the others only learn of it with check_calls.
        """

    def dispatch_async(
        self,
        hidden_states: Tensor | WireTensor,
        topk: TopKOutput,
        *,
        experts_need_grad: NeedGrad = False,
    ) -> Pending[DispatchT]:
        """Begin a dispatch; `wait()` completes it and makes its autograd node.

        This default does everything in `wait()`. All ranks call `wait()` in the same order.
        """
        return Pending(
            lambda: self.dispatch(hidden_states, topk, experts_need_grad=experts_need_grad)
        )

    def combine_async(self, combine_input: CombineT) -> Pending[Tensor]:
        """Begin a combine; `wait()` completes it. This default does everything in `wait()`."""
        return Pending(lambda: self.combine(combine_input))

    @abstractmethod
    def check(self) -> None:
        """Raise the faults recorded on the device.

        Static buffers (low latency, or a slot budget) cannot raise in dispatch: y of the call is
        NaN on every rank, and check() raises the reason. On other buffers it does nothing.

        Local; every rank raises the same fault.   Host sync: yes.
        Raises:
            CapacityError: T > M, or more received slots than the budget, with the size needed.
            ShapeError, ConfigError: another fault, with the ranks that have it.
        """

    @abstractmethod
    def close(self) -> None:
        """Make further calls raise, also for batches in flight. Local, idempotent.

        A call on a closed dispatcher is still reported to the other ranks, which may be waiting.
        After the EPGroup is closed too, calls raise immediately.
        """
