"""Move tokens between hosts once for each host that needs them, and then inside the hosts.

The outer buffer connects the ranks with the same index in their hosts; each rank stands for its
host. The inner buffer connects the ranks of a host; its tokens are the rows received by the outer
buffer. Example: rank 0 has a token for experts of ranks 1, 2 and 3, with hosts 0 1 and 2 3:

    dispatch    outer: one row to rank 0 itself, one to rank 2     inner: 0 to 1; 2 to itself and 3
    combine     inner: 1 to 0; 3 to 2, which adds its own          outer: 2 to 0, which adds its own

A rank that learns of a fault in one exchange takes part in the other without rows and relays the
fault, so all ranks raise and none waits for a message that is never sent. A lost rank ends both.
After the inner combine, a failure reaches only the ranks of the outer exchange.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, Dispatched, RowTopkDispatched
from epcomm.buffers.collective.all_to_all import (
    CollectiveBuffer,
    CollectiveExchangePlan,
    RowsBuffer,
)
from epcomm.buffers.collective.base import COLLECTIVE_CAPS
from epcomm.buffers.requirements import carrying_reasons
from epcomm.buffers.shared_memory.buffer import SharedMemoryBuffer
from epcomm.buffers.sizes import CallShape, Region
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.calls.order import Calls
from epcomm.collectives.base import Collectives
from epcomm.config import Mode
from epcomm.errors import BackendUnavailable, EPError, EPTimeout, describe_ranks
from epcomm.ops.slots import localize
from epcomm.platforms.host import host_of_this_process
from epcomm.platforms.machine import Machine
from epcomm.platforms.nvlink import PeerReach, reach_of, reach_reasons
from epcomm.protocol import BatchFlags, fault_word, pack_fault, unpack_fault
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import Availability, BufferCaps, BufferSpec, HostLayout
from epcomm.types import RowsPer

T = TypeVar("T")

# Regions for local experts, which this buffer does not have.
_OF_SLOTS = ("slot index", "packed slots", "expert results")
# Keys of a rank's record: its host, and the GPUs that its own GPU reaches.
_HOST, _REACH = "host", "reach"


@dataclass(frozen=True, kw_only=True, eq=False)
class HierarchicalExchangePlan(ExchangePlan):
    """The plans of the two exchanges of a dispatch.

    num_tokens: T of this rank.   num_rows, index: those of the inner exchange.
    """

    outer: ExchangePlan
    inner: ExchangePlan


class HierarchicalBuffer(Buffer):
    """Serves normal mode on several hosts of equal size, with exact sizes.

    Slots are in the order (expert, index in the host, host, token). The sums of a host are rounded
    to the dtype of the rows before they are sent, one rounding more than in a flat exchange. With
    BufferSpec.combine_format they are then quantised; sums inside a host are not.
    """

    name: ClassVar[str] = "hierarchical"
    sums_groups: ClassVar[bool] = True
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})
    counts_calls = True
    begins_calls = True

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        return Availability(ok=True)

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        # In shared memory, rows are views, so the number of batches in flight is limited.
        views = SharedMemoryBuffer.caps(mode).batches_in_flight
        return replace(
            COLLECTIVE_CAPS, batches_in_flight=views, batches_on_request=True, num_exchanges=2
        )

    @classmethod
    def lacks_between(cls, spec: BufferSpec) -> tuple[str, ...]:
        hosts = spec.hosts
        if hosts is None or hosts.num_hosts == 1:
            return (
                "needs ranks on several hosts, but they are on one host or their hosts are "
                "unknown; pass EPGroup a two-dimensional DeviceMesh of (hosts, ranks of a host)",
            )
        if not hosts.is_even:
            sizes = " and ".join(str(len(ranks)) for ranks in hosts.ranks_of_host)
            return (f"hosts have {sizes} ranks, expected the same number on each",)
        if any(list(ranks) != sorted(ranks) for ranks in zip(*hosts.ranks_of_host, strict=True)):
            return (f"needs ranks of equal local index in the order of their hosts, not {hosts}",)
        if num_places(hosts) == 1:
            return ("hosts have one rank each, so relaying saves no rows",)
        return ()

    @classmethod
    def source_order(cls, spec: BufferSpec, world_size: int) -> tuple[int, ...]:
        hosts = hosts_of(spec).ranks_of_host
        return tuple(rank for place in zip(*hosts, strict=True) for rank in place)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        hosts = hosts_of(spec)
        outer = HostRowsBuffer.region_bytes(outer_spec(spec), hosts.num_hosts)
        return outer + CollectiveBuffer.region_bytes(inner_spec(spec), num_places(hosts))

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        """Return the most bytes for the number of tokens in `call`.

        A token is sent to at most min(K, hosts - 1) other hosts, and inside all hosts together to
        at most min(K, W - hosts) more ranks.
        """
        hosts, num_tokens = hosts_of(spec), call.tokens_of_rank[call.rank]
        num_hosts, top_k = hosts.num_hosts, spec.top_k
        num_forwarded = num_tokens * min(top_k, call.world_size - num_hosts)
        outer, inner = outer_spec(spec), inner_spec(spec)
        columns = spec.returned_columns(call.world_size)
        inner_call = CallShape(
            rank=0,
            tokens_of_rank=(num_tokens * min(top_k, num_hosts),) * num_places(hosts),
            rows_sent=num_forwarded,
            rows_received=num_forwarded,
            rows_returned=num_tokens * min(top_k, (call.world_size - num_hosts) * columns),
        )
        outer_call = CallShape.most(
            *(num_tokens, top_k, num_hosts, outer.hosts),
            returned_columns=outer.returned_columns(num_hosts),
        )
        between = HostRowsBuffer.wire_bytes(outer, outer_call, backward=backward)
        return between + CollectiveBuffer.wire_bytes(inner, inner_call, backward=backward)

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        self._calls, self._collectives, self._spec = calls, calls.collectives, spec
        self._expert_places = _expert_places(spec, calls.collectives.device)
        self._group_order = self._find_group_order()

    def prepare(self) -> None:
        """Split the ranks, and open a buffer between hosts and one inside each host.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: not enough memory on some rank; on every rank.
        """
        whole, hosts = self._calls, hosts_of(self._spec)
        same_places = tuple(zip(*hosts.ranks_of_host, strict=True))
        between = whole.split(same_places, scope=", between hosts", counts_calls=True)
        inside = whole.split(hosts.ranks_of_host, scope=", inside hosts")
        self._calls_between, self._calls_inside = between, inside
        inner = inner_spec(self._spec)
        kind = inner_buffer_class(whole, inside, hosts, inner)
        self._outer = HostRowsBuffer(between, outer_spec(self._spec))
        self._inner: Buffer = kind(inside, inner)
        self._outer.prepare()
        self._prepare_inside()

    def _prepare_inside(self) -> None:
        """Prepare the inner buffer; close both buffers on all ranks if that fails on any host."""
        problem: EPError | None = None
        try:
            self._inner.prepare()
        except EPTimeout:
            raise
        except EPError as error:
            problem = error
        found = self._calls.gather_records({"error": str(problem or "")}, phase="open hierarchical")
        failed = [rank for rank, each in enumerate(found) if each["error"]]
        if problem is not None or failed:
            self.close()
            raise problem or BackendUnavailable(
                f"open_buffer: {describe_ranks(failed)} cannot open the buffer inside the host "
                f"(this is {self._collectives.names.where}): {found[failed[0]]['error']}"
            )

    def dispatch(self, call: DispatchCall) -> Dispatched:
        came = _tried(lambda: self._outer.dispatch(self._call_between(call)))
        if isinstance(came, EPError):
            # Name the rank, so that others inside know that the hosts have learned of the fault.
            code, rank = unpack_fault(fault_word(came), self._collectives.rank)
            came.fault_word = pack_fault(code, rank)
            self._inner.dispatch(_without_tokens(call, came, self._spec))
            raise came
        try:
            inner = self._dispatch_inside(_call_inside(call, came))
        except Exception as problem:
            # All hosts already know of a fault that was relayed from the outer exchange. Report any
            # other fault of this host in the outer combine, where the other hosts are next.
            if not (isinstance(problem, EPError) and problem.was_passed_on):
                self._refuse_between(problem)
            raise
        outer = came.exchange_plan
        if self._group_order is not None:
            assert isinstance(outer, CollectiveExchangePlan), "HostRowsBuffer made it"
            assert outer.addends is not None, "the buffer has groups"
            # Add the returned rows of a token in ascending order of groups.
            outer = replace(outer, addends=outer.addends[:, self._group_order])
        exchange_plan = HierarchicalExchangePlan(
            num_tokens=call.num_tokens,
            num_rows=inner.exchange_plan.num_rows,
            index=inner.index,
            outer=outer,
            inner=inner.exchange_plan,
        )
        return replace(inner, exchange_plan=exchange_plan)

    def _find_group_order(self) -> Tensor | None:
        """Return the column of each group, [G], in the outer exchange; None if in their order."""
        spec, places = self._spec, self._expert_places
        if spec.sum_groups is None or spec.sums_at_source or places is None:
            return None
        group_size = spec.num_local_experts * self._collectives.world_size // spec.sum_groups
        return places[::group_size] // group_size

    def _dispatch_inside(self, call: DispatchCall) -> Dispatched:
        """Dispatch inside the host; report a failure before the header to its ranks."""

        def report(problem: Exception) -> None:
            if isinstance(problem, EPError):
                return
            error = _as_error(problem, "dispatch", self._collectives)
            with suppress(EPError):
                self._inner.dispatch(_without_tokens(call, error, self._spec))

        return self._calls_inside.announced(
            lambda: self._inner.dispatch(call), report if self._inner.counts_calls else None
        )

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, HierarchicalExchangePlan), "a plan of this buffer"
        rows = _tried(lambda: self._outer.cached_dispatch(hidden_states, exchange_plan.outer))
        if isinstance(rows, EPError):
            self._inner.combine(hidden_states[:0], None, rows_per=RowsPer.ROW, error=rows)
            raise rows
        return self._inner.cached_dispatch(rows, exchange_plan.inner)

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan | None,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
        error: EPError | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if error is not None:
            with suppress(type(error)):
                self._inner.combine(rows, None, rows_per=rows_per, error=error)
            return self._outer.combine(rows, None, rows_per=rows_per, error=error)
        assert isinstance(exchange_plan, HierarchicalExchangePlan), "a plan of this buffer"
        number = self._calls_inside.next_batch
        try:
            sums, scalars = self._combine_inside(
                rows, exchange_plan, rows_per, slot_weights, row_scalars
            )
        except Exception as problem:
            # If the header was not sent yet, the dispatcher reports the failure in both exchanges.
            is_untold = self._inner.counts_calls and self._calls_inside.next_batch == number
            if isinstance(problem, EPError) or not is_untold:
                self._refuse_between(problem)
            raise

        def report(problem: Exception) -> None:
            # The inner combine is complete, so only the outer exchange needs the report.
            if not isinstance(problem, EPError):
                self._refuse_between(problem)

        return self._calls_between.announced(
            lambda: self._outer.combine(
                sums,
                exchange_plan.outer,
                rows_per=RowsPer.ROW,
                # The rows are weighted, unless the source rank sums.
                slot_weights=slot_weights,
                row_scalars=scalars,
            ),
            report,
        )

    def _combine_inside(
        self,
        rows: Tensor,
        exchange_plan: HierarchicalExchangePlan,
        rows_per: RowsPer,
        slot_weights: Tensor | None,
        row_scalars: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rows that this rank returns to other hosts, and their scalars.

        With sum_groups they are the rows of groups as the ranks of this host have rounded them.
        """
        inner, outer = exchange_plan.inner, exchange_plan.outer
        if self._spec.sum_groups is None:
            return self._inner.combine(
                rows, inner, rows_per=rows_per, slot_weights=slot_weights, row_scalars=row_scalars
            )
        assert isinstance(self._inner, RowsBuffer), "inner_buffer_class() chose it"
        assert isinstance(outer, CollectiveExchangePlan), "HostRowsBuffer made it"
        assert isinstance(inner, CollectiveExchangePlan), "a RowsBuffer made it"
        assert inner.addends is not None, "the buffer has groups"
        returned, scalars = self._inner.return_rows(
            rows, inner, rows_per=rows_per, slot_weights=slot_weights, row_scalars=row_scalars
        )
        # Both exchanges have the same pairs of a row: the groups, or the entries, of the host.
        number = outer.returned_splits[0]
        places = torch.nonzero_static(inner.addends.flatten() >= 0, size=sum(number)).flatten()
        order = inner.addends.flatten()[places]
        return returned[order], None if scalars is None else scalars[order]

    def check(self) -> None:
        self._outer.check()
        self._inner.check()

    def traffic(self) -> BufferTraffic:
        return self._outer.traffic() + self._inner.traffic()

    def close(self) -> None:
        self._outer.close()
        self._inner.close()

    def abandon(self) -> None:
        self._outer.abandon()
        self._inner.abandon()

    def _call_between(self, call: DispatchCall) -> DispatchCall:
        """Return the call for the outer buffer, in which experts of a host are contiguous."""
        if self._expert_places is None:
            return call
        ids = call.topk_ids
        # Keep ids that are out of range, so that the outer dispatch reports them.
        is_expert = (ids >= 0) & (ids < self._expert_places.shape[0])
        places = self._expert_places[torch.where(is_expert, ids, 0)]
        return replace(call, topk_ids=torch.where(is_expert, places, ids))

    def _refuse_between(self, problem: Exception) -> None:
        """Report a problem in the outer combine, unless it is an EPTimeout."""
        if not isinstance(problem, EPTimeout):
            error = _as_error(problem, "combine", self._collectives)
            # The caller raises the error that is returned.
            error.was_raised = True
            shape, dtype = (0, self._spec.hidden_size), self._spec.hidden_format.dtype.torch_dtype
            no_rows = torch.empty(shape, dtype=dtype, device=self._collectives.device)
            with suppress(type(error)):
                self._outer.combine(no_rows, None, rows_per=RowsPer.ROW, error=error)


def _tried(function: Callable[[], T]) -> T | EPError:
    """Return the result or the EPError that all ranks of an exchange raise; raise EPTimeout."""
    try:
        return function()
    except EPTimeout:
        raise
    except EPError as error:
        return error


def _as_error(problem: Exception, function: str, collectives: Collectives) -> EPError:
    if isinstance(problem, EPError):
        return problem
    return EPError(f"{function}: {problem} ({collectives.names.where}); correct this error")


def _call_inside(call: DispatchCall, came: Dispatched) -> DispatchCall:
    """Return the call for the inner buffer, with the rows of an outer dispatch as its tokens."""
    assert isinstance(came, RowTopkDispatched), "HostRowsBuffer makes it"
    topk_ids, topk_weights = came.row_topk
    flags = came.any_flags
    if not call.flags & BatchFlags.GRAD_ENABLED:
        # The ranks of this host must learn that this rank runs under no_grad.
        flags &= ~BatchFlags.GRAD_ENABLED
    return replace(
        call,
        hidden_states=came.rows if came.rows.format.dtype.is_quantized else came.rows.data,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        flags=flags,
    )


def _without_tokens(call: DispatchCall, error: EPError, spec: BufferSpec) -> DispatchCall:
    """Return an inner call without tokens that reports an error of the outer exchange."""
    ids = call.topk_ids.new_empty(0, spec.top_k)
    dtype = spec.hidden_format.dtype
    return replace(
        call,
        hidden_states=torch.empty(0, spec.hidden_size, dtype=dtype.torch_dtype, device=ids.device),
        topk_ids=ids,
        topk_weights=torch.empty(0, spec.top_k, dtype=dtype.scalar_dtype, device=ids.device),
        error=error,
    )


def _expert_places(spec: BufferSpec, device: torch.device) -> Tensor | None:
    """Return new expert numbers, [P], contiguous on each host; None if they already are."""
    hosts, num_local = hosts_of(spec), spec.num_local_experts
    in_order = [rank for ranks in hosts.ranks_of_host for rank in ranks]
    if in_order == sorted(in_order):
        return None
    experts = torch.arange(num_local, device="cpu")
    first_experts = torch.tensor(in_order, device="cpu").unsqueeze(1) * num_local
    return (first_experts + experts).flatten().argsort().to(device)


def hosts_of(spec: BufferSpec) -> HostLayout:
    """Return the hosts of a specification that lacks_between() has checked."""
    assert spec.hosts is not None, "lacks_between() rejects unknown hosts"
    return spec.hosts


def num_places(hosts: HostLayout) -> int:
    """Return the number of ranks of each host."""
    return hosts.world_size // hosts.num_hosts


def outer_spec(spec: BufferSpec) -> BufferSpec:
    """Return the specification of the outer buffer: W is the number of hosts.

    A rank has the experts of its whole host, and each rank is on another host.
    """
    hosts = hosts_of(spec)
    return replace(
        spec,
        num_local_experts=spec.num_local_experts * num_places(hosts),
        expert_alignment=1,
        batches_in_flight=None,
        hosts=HostLayout.of(range(hosts.num_hosts)),
    )


def inner_spec(spec: BufferSpec) -> BufferSpec:
    """Return the specification of the inner buffer, whose tokens are rows from all hosts."""
    most, groups = spec.max_tokens_per_rank, spec.sum_groups
    return replace(
        spec,
        max_tokens_per_rank=None if most is None else most * hosts_of(spec).num_hosts,
        # The experts of one host have their part of the groups.
        sum_groups=None if groups is None else groups // hosts_of(spec).num_hosts,
        # The rank that relays a sum or a gradient quantises it, so it is quantised once.
        combine_format=None,
        backward_format=None,
        hosts=None,
    )


class HostRowsBuffer(CollectiveBuffer):
    """Sends tokens between ranks with the same index in their hosts; each stands for its host.

    A rank has the experts of its whole host here. A dispatch returns rows with their expert ids in
    the host and their weights (RowTopkDispatched), as input of the inner buffer. It makes no index
    over the rows, because the inner buffer would not use it.
    """

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        return tuple(
            replace(region, name=f"{region.name}, between hosts")
            for region in super().region_bytes(spec, world_size)
            if region.name not in _OF_SLOTS
        )

    def _index(
        self, ids: Tensor, weights: Tensor, counts: Tensor, size: Sequence[int] | int
    ) -> tuple[SlotIndex, Tensor | None]:
        """Return an index without slots; the inner buffer reads _with_topk() instead."""
        nothing = torch.empty(0, dtype=torch.int64, device=ids.device)
        return SlotIndex(
            row_of_slot=None,
            slots_of_row=None,
            num_tokens_per_expert=nothing,
            first_slot=nothing,
            host_num_tokens_per_expert=None,
        ), None

    def _with_topk(self, out: Dispatched, received: Tensor) -> RowTopkDispatched:
        """Add the ids in the host and the weights of each row, [R, K]."""
        layout, num_local = self._dispatch_layout, self._spec.num_local_experts
        ids = localize(layout.ids(received), self._first_expert, num_local).long()
        # A token for several hosts has the weights of all its experts; clear those of other hosts.
        row_topk = ids, layout.scalars(received).masked_fill(ids < 0, 0)
        return RowTopkDispatched(**vars(out), row_topk=row_topk)


def inner_buffer_class(
    calls: Calls, inside: Calls, hosts: HostLayout, spec: BufferSpec
) -> type[Buffer]:
    """Return the fastest buffer class that serves every host, equal on all ranks.

    calls: the calls of all ranks.   inside: the calls of the ranks of this host.
    spec: the specification of the buffer inside a host.

    Collective: yes.   Host sync: yes.
    """
    collectives = calls.collectives
    mine = {_HOST: host_of_this_process(), _REACH: ""}
    if collectives.device.type == "cuda":
        mine[_REACH] = reach_of(collectives.device).as_text()
    found = calls.gather_records(mine, phase="open hierarchical")
    if collectives.device.type == "cuda" and spec.sum_groups is not None:
        # Rows of groups are relayed without a sum, which only a RowsBuffer returns.
        return CollectiveBuffer
    if collectives.device.type == "cuda":
        reaches = [PeerReach.parse(str(each[_REACH])) for each in found]
        joined = [[reaches[rank] for rank in ranks] for ranks in hosts.ranks_of_host]
        # Mapping the memory of peers needs a process group, which parts of gloo groups lack.
        if inside.collectives.process_group is None or any(map(reach_reasons, joined)):
            return CollectiveBuffer
        # It imports Triton.
        from epcomm.buffers.nvlink.normal import NVLinkBuffer

        is_carried = not carrying_reasons(spec, NVLinkBuffer.caps(Mode.NORMAL))
        return NVLinkBuffer if is_carried else CollectiveBuffer
    # Ranks of one host may be unable to share memory, for example in two containers.
    shared = [{found[rank][_HOST] for rank in ranks} for ranks in hosts.ranks_of_host]
    shares = all(len(each) == 1 and "" not in each for each in shared)
    return SharedMemoryBuffer if shares and calls.waits else CollectiveBuffer
