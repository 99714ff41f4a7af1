"""The contract of a dispatcher: dispatch a batch, combine its results, name every fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

from torch import Tensor

from epcomm.records import CombineInput, DispatchOutput, Pending, TopKOutput
from epcomm.types import WireTensor

DispatchT = TypeVar("DispatchT", bound=DispatchOutput)
CombineT = TypeVar("CombineT", bound=CombineInput)

# Whether the weights of a rank's experts will receive gradients: all of them, or each by name.
NeedGrad = bool | Mapping[str, bool]


class Dispatcher(ABC, Generic[DispatchT, CombineT]):
    """Moves the tokens of one layer to their experts and the results back.

    Nothing about a batch in flight is kept here, so batches may interleave: as many as
    BufferCaps.batches_in_flight says without gradients, and any number with them.
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
            hidden_states: [T, H], the dtype given at construction, or another floating one, which
                is cast and which y comes back in; T <= M, T = 0 is legal. Or rows that are
                quantised already, in the dispatch format of the plan, with scales of any layout and
                strides: they travel as they are, have no gradients, and y comes back in the dtype
                given at construction.
            topk: topk_ids [T, K], int64, physical expert ids, -1 for none; topk_weights [T, K],
                float32, or another floating dtype, which is cast.
            experts_need_grad: this rank's expert weights will receive gradients, so combine runs
                its backward even where no input needs one; or which of them will, by name, in one
                order and with equal answers on all ranks.

        Collective: all ranks of the group; T may differ.
        Host sync, graph capture, lifetime of rows: as the buffer's caps say.
        Raises:
            ShapeError: a tensor of some rank does not fit; on every rank, before rows are sent.
            CapacityError: T > M on some rank; on every rank.
            ConfigError: some ranks need gradients while others run under torch.no_grad() or give
                rows that are quantised already, or for other expert weights than others.
            HandleError: the dispatcher is closed.
            EPTimeout: other ranks did not come in time; the group is lost, close() returns.
        A static buffer tells the first three only through check().
        """

    @abstractmethod
    def combine(self, combine_input: CombineT) -> Tensor:
        """Bring the results back and add them up: [T, H] in the dtype of the rows.

        Collective: all ranks that dispatched this batch.   Host sync: none on a device.
        Lifetime: the caller owns the result.
        Raises:
            HandleError: the batch was combined before, belongs to another dispatcher, or the
                dispatcher is closed.
            ShapeError: the rows do not fit the batch.
            EPTimeout: as in dispatch.
        The first two are raised on every rank, before rows are sent, and the batch may then be
        combined again. On a static buffer only the rank that errs raises; the others get NaN and
        hear of it through check(). On NCCL the others hear of it only with check_calls.
        """

    def dispatch_async(
        self,
        hidden_states: Tensor | WireTensor,
        topk: TopKOutput,
        *,
        experts_need_grad: NeedGrad = False,
    ) -> Pending[DispatchT]:
        """Begin a dispatch; `wait()` completes it and makes its autograd node.

        This default does everything in `wait()`. Waits come in one order on all ranks.
        """
        return Pending(
            lambda: self.dispatch(hidden_states, topk, experts_need_grad=experts_need_grad)
        )

    def combine_async(self, combine_input: CombineT) -> Pending[Tensor]:
        """Begin a combine; `wait()` completes it. This default does everything in `wait()`."""
        return Pending(lambda: self.combine(combine_input))

    @abstractmethod
    def check(self) -> None:
        """Raise the faults that wait on the device; call it where the host may wait.

        Static buffers (low latency, or a slot budget) cannot raise in dispatch: the y of the call
        is NaN on every rank, and this tells why. Elsewhere it does nothing.

        Local; every rank raises alike.   Host sync: yes.
        Raises:
            CapacityError: T > M, or received slots past the budget, with the size needed.
            ShapeError, ConfigError: another fault, with the ranks it names.
        """

    @abstractmethod
    def close(self) -> None:
        """Refuse further calls; handles in flight raise. Local, idempotent.

        A refused call still tells the other ranks, which may wait in theirs; after the EPGroup is
        closed too, calls raise at once.
        """
