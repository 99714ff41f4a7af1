import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import EPError
from epcomm.calls.call import DispatchCall
from epcomm.integrations.deep_ep import Buffer, Config, EventHandle, EventOverlap
from epcomm.integrations.deep_ep.ranks import Ranks, Service
from epcomm.integrations.deep_ep.v1.normal import UNKNOWN
from epcomm.spec import BufferSpec
from tests.integrations.deep_ep.devices import here, on_gpus
from tests.integrations.deep_ep.v1_ranks import world

pytestmark = pytest.mark.ranks(2)


class Batch:
    """Tokens of one rank and their routing; x[t] is a number of the rank and token."""

    def __init__(self, rank: int, shape: tuple[int, int, int], *, num_tokens: int = 3) -> None:
        hidden_size, top_k, self.num_experts = shape
        tokens = torch.arange(num_tokens, device=here())
        self.x = (1.0 + 10 * rank + tokens).unsqueeze(1).repeat(1, hidden_size).bfloat16()
        self.ids = (
            tokens.unsqueeze(1) + torch.arange(top_k, device=here()) + rank
        ) % self.num_experts
        self.weights = torch.full((num_tokens, top_k), 0.5, device=here())

    def dispatch(
        self,
        buffer: Buffer,
        x: Tensor | tuple[Tensor, Tensor] | None = None,
        ids: Tensor | None = None,
        **options: Any,  # noqa: ANN401 - any of dispatch
    ) -> tuple[Any, Any, Any, Tensor]:
        """Return rows, weights, handle and how many ranks a token goes to."""
        ids = self.ids if ids is None else ids
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, self.num_experts)
        rows, _, weights, _, handle, _ = buffer.dispatch(
            self.x if x is None else x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=self.weights,
            **options,
        )
        return rows, weights, handle, is_in_rank.sum(1, keepdim=True)


def along(buffer: Buffer, x: Tensor, handle: tuple[Tensor, ...]) -> Tensor:
    """Return the rows of x along a handle."""
    rows = buffer.dispatch(x, handle=handle)[0]
    assert isinstance(rows, Tensor)
    return rows


def test_one_buffer_serves_any_shapes_and_keeps_any_handles() -> None:
    rank, buffer = world().rank(), Buffer(world(), low_latency_mode=True)
    kept = []
    for number, shape in enumerate([(64, 2, 4), (32, 3, 8), (64, 2, 4), (64, 1, 4)]):
        batch = Batch(rank, shape, num_tokens=3 * number if rank else 4)
        kept.append((batch, *batch.dispatch(buffer)))
        slabs, _, handle, _, _ = buffer.low_latency_dispatch(
            batch.x, batch.ids.int(), 16, batch.num_experts, use_fp8=False
        )
        y, _, _ = buffer.low_latency_combine(slabs, batch.ids.int(), batch.weights, handle)
        assert torch.equal(y, (batch.x.float() * 0.5 * shape[1]).bfloat16())
    # The backward of combine is a dispatch along the handle, that of dispatch another combine.
    for batch, rows, weights, handle, num_ranks in reversed(kept):
        for factor in (1, 2):
            y, returned, _ = buffer.combine(rows * factor, handle, topk_weights=weights)
            assert torch.equal(y, (batch.x.float() * factor * num_ranks).bfloat16())
            assert torch.equal(returned, batch.weights)
            assert torch.equal(along(buffer, batch.x * factor, handle), rows * factor)


def test_a_rank_alone_reads_compares_and_saves_a_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two channels, and so two tokens in the first and one in the second.
    monkeypatch.setattr(Buffer, "num_sms", 4)
    buffer = Buffer(world())
    batch = Batch(buffer.rank, (64, 2, 4))
    rows, _, handle, num_ranks = batch.dispatch(buffer)
    other = batch.dispatch(buffer)[2]
    # Only rank 0 reads the handle. If a read communicated, it would meet the combine of the other
    # rank.
    if buffer.rank == 0:
        # The first token goes to rank 0, the second to both ranks and the third to rank 1.
        assert handle[4].tolist() == [[True, False], [True, True], [False, True]]
        assert handle[0].tolist() == [[2, 0], [4, 0]]
        assert handle[1].tolist() == [[2, 2], [1, 2]]
        assert [each.tolist() for each in handle[-1:]] == [[[0, -1], [1, 0], [-1, 0]]]
        # The numbers of the source ranks are not sent, and this value cannot be mistaken for one.
        assert handle[2].tolist() == [[UNKNOWN] * 2] * 2
        assert handle[3].tolist() == [UNKNOWN] * len(rows)
        with pytest.raises(IndexError):
            _ = rows.cpu()[handle[3].cpu().long()]
        with pytest.raises(IndexError):
            _ = handle[6]
        assert "T = (4, 64, 3) on rank 0" in repr(handle)
        assert str(handle) == repr(handle)
        assert handle == handle
        assert handle != other
        assert all(mine is again for mine, again in zip(handle, tuple(handle), strict=True))
        tensors = [each.clone() for each in handle]
        assert buffer._saved_handles.find(tensors) is None
        assert buffer._saved_handles.find(list(handle)) is handle.exchange  # type: ignore[attr-defined]
    y, _, _ = buffer.combine(rows, handle)
    assert torch.equal(y, batch.x * num_ranks)


def test_rows_travel_by_ranks_alone_where_there_are_no_ids() -> None:
    rank, buffer = world().rank(), Buffer(world())
    is_in_rank = torch.tensor([[True, False], [True, True], [False, False]], device=here())
    x = torch.full((3, 16), 1.0 + rank, device=here()).bfloat16()
    rows, ids, weights, counts, handle, _ = buffer.dispatch(
        x,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=torch.tensor([1, 1, 0, 1], dtype=torch.int32, device=here()),
        expert_alignment=4,
    )
    assert isinstance(rows, Tensor)
    assert (ids, weights, counts) == (None, None, [4, 4] if rank == 0 else [0, 4])
    assert rows[:, 0].tolist() == ([1.0, 1.0, 2.0, 2.0] if rank == 0 else [1.0, 2.0])
    y, _, _ = buffer.combine(rows, handle)
    assert torch.equal(y, x * is_in_rank.sum(1, keepdim=True))


@pytest.mark.ranks(4)
def test_a_group_is_a_part_of_the_world() -> None:
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    group = groups[world().rank() % 2]
    buffer = Buffer(group)
    assert (buffer.rank, buffer.group_size) == (world().rank() // 2, 2)
    batch = Batch(buffer.rank, (16, 2, 4))
    rows, _, handle, num_ranks = batch.dispatch(buffer)
    y, _, _ = buffer.combine(rows, handle)
    assert torch.equal(y, batch.x * num_ranks)


def wrong_dtype(buffer: Buffer, batch: Batch) -> Tensor:
    return batch.dispatch(buffer, batch.x.double() if buffer.rank == 0 else None)[0]


def wrong_ids(buffer: Buffer, batch: Batch) -> Tensor:
    return batch.dispatch(buffer, ids=batch.ids + 4 * (buffer.rank == 0))[0]


def wrong_rows(buffer: Buffer, batch: Batch) -> Tensor:
    rows, _, handle, _ = batch.dispatch(buffer)
    return buffer.combine(rows[buffer.rank == 0 :], handle)[0]


def wrong_cached_rows(buffer: Buffer, batch: Batch) -> Tensor:
    rows = along(buffer, batch.x[buffer.rank == 0 :], batch.dispatch(buffer)[2])
    # The rows of rank 0 come first; those of this rank are what it sent.
    return rows[: len(rows) - len(batch.x)]


def too_wide_cached_rows(buffer: Buffer, batch: Batch) -> Tensor:
    x = batch.x.double() if buffer.rank == 0 else batch.x
    rows = along(buffer, x, batch.dispatch(buffer)[2])
    return rows[: len(rows) - len(batch.x)]


def wrong_dtype_of_low_latency(buffer: Buffer, batch: Batch) -> Tensor:
    x = batch.x.double() if buffer.rank == 0 else batch.x
    return there_and_back(buffer, batch, x, batch.weights)


def too_many_tokens(buffer: Buffer, batch: Batch, max_tokens: int = 4) -> Tensor:
    if buffer.rank == 0:
        shape = (batch.x.shape[1], batch.ids.shape[1], batch.num_experts)
        batch = Batch(0, shape, num_tokens=max_tokens + 1)
    return there_and_back(buffer, batch, batch.x, batch.weights, max_tokens)


def too_many_tokens_of_a_new_shape(buffer: Buffer, batch: Batch) -> Tensor:
    return too_many_tokens(buffer, batch, 3)


def wrong_ids_of_a_new_shape(buffer: Buffer, batch: Batch) -> Tensor:
    wide = Batch(buffer.rank, (2 * batch.x.shape[1], 2, 4))
    # Rank 0 can determine K only from its weights.
    return wide.dispatch(buffer, ids=wide.ids[buffer.rank == 0 :])[0]


def unknown_top_k_of_a_new_shape(buffer: Buffer, batch: Batch) -> Tensor:
    wide = Batch(buffer.rank, (2 * batch.x.shape[1], 2, 4))
    if buffer.rank == 0:
        wide.ids = wide.ids[0]
    return there_and_back(buffer, wide, wide.x, wide.weights)


def wrong_weights(buffer: Buffer, batch: Batch) -> Tensor:
    weights = batch.weights.double() if buffer.rank == 0 else batch.weights
    return there_and_back(buffer, batch, batch.x, weights)


def there_and_back(
    buffer: Buffer, batch: Batch, x: Tensor, weights: Tensor, max_tokens: int = 4
) -> Tensor:
    slabs, _, handle, _, hook = buffer.low_latency_dispatch(
        x, batch.ids, max_tokens, 4, use_fp8=False, return_recv_hook=True
    )
    hook()
    return buffer.low_latency_combine(slabs, batch.ids, weights, handle)[0]


# Calls that are an error on every rank of GPUs.
RAISED = (wrong_dtype, wrong_ids, wrong_ids_of_a_new_shape, unknown_top_k_of_a_new_shape)
# Calls in which no host of a GPU reads what other ranks report: these receive NaN.
GIVES_NAN = (
    *(wrong_rows, wrong_cached_rows, too_wide_cached_rows),
    *(wrong_dtype_of_low_latency, too_many_tokens, wrong_weights),
)


# On CPUs every host reads, and test_v1_bad_calls.py has the cases.
@pytest.mark.parametrize("is_first_call", [False, True])
@pytest.mark.parametrize("call", [*RAISED, *GIVES_NAN] if on_gpus() else [wrong_rows])
def test_what_one_rank_gets_wrong_is_reported_to_every_rank(
    call: Callable[[Buffer, Batch], Tensor], is_first_call: bool
) -> None:
    buffer = Buffer(world(), low_latency_mode=True)
    batch = Batch(buffer.rank, (32, 2, 4))
    if not is_first_call:
        batch.dispatch(buffer)
        there_and_back(buffer, batch, batch.x, batch.weights)
    # A first call opens buffers, so every host reads.
    is_read = is_first_call and call in (wrong_dtype_of_low_latency, too_many_tokens)
    check_reported(call, buffer, batch, by_nan=on_gpus() and call in GIVES_NAN and not is_read)


def with_gradients(rank: int) -> Batch:
    """Return a batch whose tensors need gradients on one rank only, as if others were frozen."""
    batch = Batch(rank, (128, 2, 4))
    batch.x.requires_grad_(rank == 0)
    batch.weights.requires_grad_(rank == 0)
    return batch


def tensors_of(argument: object) -> list[Tensor]:
    """Return the tensors of an argument of a buffer, without the ids of a dispatch."""
    if isinstance(argument, DispatchCall):
        rows = argument.hidden_states
        parts = (rows,) if isinstance(rows, Tensor) else (rows.data, rows.scales)
        return [each for each in (*parts, argument.topk_weights) if each is not None]
    return [argument] if isinstance(argument, Tensor) else []


@pytest.fixture
def refuses_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no buffer receives a tensor with a history, which rows sent as bytes hide."""
    opened = Ranks.open

    def watched(call: Callable[..., object]) -> Callable[..., object]:
        def checked(*args: object, **named: object) -> object:
            given = [each for one in (*args, *named.values()) for each in tensors_of(one)]
            assert not any(each.requires_grad for each in given)
            return call(*args, **named)

        return checked

    def open_watched(ranks: Ranks, service: Service, spec: BufferSpec) -> object:
        buffer = opened(ranks, service, spec)
        for name in ("dispatch", "cached_dispatch", "combine"):
            if hasattr(buffer, name):
                monkeypatch.setattr(buffer, name, watched(getattr(buffer, name)))
        return buffer

    monkeypatch.setattr(Ranks, "open", open_watched)


@pytest.mark.usefixtures("refuses_histories")
def test_autograd_is_left_to_the_caller() -> None:
    buffer = Buffer(world())
    batch = with_gradients(buffer.rank)
    rows, weights, handle, num_ranks = batch.dispatch(buffer)
    again = along(buffer, batch.x, handle)
    assert not any(each.requires_grad for each in (rows, weights, again))
    weights = weights.requires_grad_()
    bias = torch.ones_like(batch.x).requires_grad_()
    y, sums, _ = buffer.combine(rows.requires_grad_(), handle, topk_weights=weights, bias=bias)
    assert torch.equal(y, batch.x.detach() * num_ranks + 1)
    assert not y.requires_grad
    assert not sums.requires_grad
    codes = torch.ones(batch.x.shape, device=here()).to(torch.float8_e4m3fn)
    scales = torch.ones(len(codes), 1, device=here(), requires_grad=True)
    assert not batch.dispatch(buffer, (codes, scales))[0][1].requires_grad


@pytest.mark.usefixtures("refuses_histories")
def test_low_latency_keeps_no_history() -> None:
    buffer = Buffer(world(), low_latency_mode=True)
    batch = with_gradients(buffer.rank)
    slabs, _, handle, _, _ = buffer.low_latency_dispatch(
        batch.x, batch.ids, 4, batch.num_experts, use_fp8=False
    )
    assert isinstance(slabs, Tensor)
    assert not slabs.requires_grad
    # x is a parameter, which operators of torch may not write to.
    out = torch.zeros_like(batch.x).requires_grad_()
    rows = slabs.clone().requires_grad_()
    y, _, _ = buffer.low_latency_combine(rows, batch.ids, batch.weights, handle, out=out)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(y.detach(), batch.x.detach())
    # Experts with gradients keep what they wrote, although the memory is used again.
    for _ in range(2):
        slabs, _, handle, _, _ = buffer.low_latency_dispatch(
            batch.x, batch.ids, 4, batch.num_experts, use_fp8=False
        )
        place = buffer.get_next_low_latency_combine_buffer(handle)
        assert not place.requires_grad
        place.copy_(rows)
        y, _, _ = buffer.low_latency_combine(
            place, batch.ids, batch.weights, handle, zero_copy=True
        )
        assert torch.equal(y, batch.x.detach())
        assert not y.requires_grad


def test_combine_sums_weights_over_the_ranks_of_a_token() -> None:
    check_sums_of_weights(Buffer(world()))


def check_sums_of_weights(buffer: Buffer) -> None:
    """Check sums of weights that each rank chose, also for ids of -1, which DeepEP sums too."""
    batch = Batch(buffer.rank, (32, 2, 2 * buffer.group_size))
    batch.ids[0, 1] = -1
    _, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(batch.ids, batch.num_experts)
    rows, ids, weights, _, handle, _ = buffer.dispatch(
        batch.x,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=batch.ids,
        topk_weights=batch.weights,
    )
    weights = weights.masked_fill(ids == -1, float(2**buffer.rank))
    for _ in range(2):
        _, sums, _ = buffer.combine(rows, handle, topk_weights=weights)
        ranks = torch.arange(buffer.group_size, device=here())
        owners = torch.where(batch.ids < 0, -1, batch.ids // 2)
        is_other = is_in_rank.unsqueeze(1) & (owners.unsqueeze(2) != ranks)
        others = (is_other * 2.0**ranks).sum(2)
        assert torch.equal(sums, others + torch.where(batch.ids < 0, 0, batch.weights))


def test_rows_along_a_handle_of_worst_case_rows_are_as_many() -> None:
    buffer = Buffer(world())
    batch = Batch(buffer.rank, (32, 2, 4))
    rows, _, handle, _ = batch.dispatch(buffer, num_worst_tokens=16)
    again = along(buffer, batch.x, handle)
    assert again.shape == rows.shape == (16, 32)
    y, _, _ = buffer.combine(again, handle)
    assert torch.equal(y, batch.x * batch.dispatch(buffer)[3])
    # One SM is a channel, and all tokens are its own.
    assert batch.dispatch(buffer, config=Config(num_sms=1))[2][1].shape == (2, 1)


def test_rows_along_a_handle_fit_into_its_memory() -> None:
    buffer = Buffer(world())
    # 144 codes and two scales are not a multiple of 16 bytes.
    batch = Batch(buffer.rank, (144, 2, 4))
    handle = batch.dispatch(buffer)[2]
    with pytest.raises(EPError, match=r"x is torch\.float32, whose rows take 576 bytes"):
        buffer.dispatch(batch.x.float(), handle=handle)
    codes = batch.x.to(torch.float8_e4m3fn)
    scales = batch.x[:, :2].float().contiguous()
    (found, found_scales), *_ = buffer.dispatch((codes, scales), handle=handle)
    rows, *_ = batch.dispatch(buffer)
    assert torch.equal(found.view(torch.uint8), rows.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(found_scales, rows[:, :2].float())


def check_reported(
    call: Callable[[Buffer, Batch], Tensor], buffer: Buffer, batch: Batch, *, by_nan: bool
) -> None:
    """Make a call that is wrong on rank 0: it raises, and the others raise too or receive NaN."""
    if by_nan and buffer.rank:
        assert call(buffer, batch).isnan().all()
    else:
        with pytest.raises(EPError, match=r"rank 0"):
            call(buffer, batch)
    rows, _, handle, num_ranks = batch.dispatch(buffer)
    y, _, _ = buffer.combine(rows, handle)
    assert torch.equal(y, batch.x * num_ranks)
    y = there_and_back(buffer, batch, batch.x, batch.weights)
    assert torch.equal(y, batch.x)


class DispatchAndSave(torch.autograd.Function):
    """Saves the tensors of a handle, which are inputs, outputs or neither of the node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Buffer, batch: Batch, returns_handle: bool) -> Any:  # noqa: ANN401 - as torch has it
        rows, _, handle, _ = batch.dispatch(buffer, x)
        tensors = tuple(handle)
        ctx.save_for_backward(*tensors)
        ctx.buffer = buffer
        if not returns_handle:
            return rows
        ctx.mark_non_differentiable(*tensors)
        return rows, *tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401 - as torch has it
        grad = grads[0]
        dx, _, _ = ctx.buffer.combine(grad, ctx.saved_tensors)
        assert along(ctx.buffer, dx, list(ctx.saved_tensors)).shape == grad.shape
        return dx, None, None, None


@pytest.mark.parametrize("returns_handle", [False, True])
def test_the_tensors_of_a_handle_serve_in_its_place(returns_handle: bool) -> None:
    buffer = Buffer(world())
    batch = Batch(buffer.rank, (32, 2, 4))
    x = batch.x.clone().requires_grad_()
    for _ in range(2):
        out = DispatchAndSave.apply(x, buffer, batch, returns_handle)
        rows = out[0] if returns_handle else out
        rows.backward(rows.detach())
        expected = batch.x * batch.dispatch(buffer)[3]
        assert torch.equal(x.grad, expected)
        x.grad = None


def test_what_a_handle_stands_for_is_freed_with_its_tensors() -> None:
    buffer = Buffer(world())
    batch = Batch(buffer.rank, (32, 2, 4))
    handle = batch.dispatch(buffer)[2]
    tensors, plan = tuple(handle), weakref.ref(handle.exchange.exchange_plan)  # type: ignore[attr-defined]
    del handle
    batch.dispatch(buffer)
    assert plan() is not None
    del tensors
    batch.dispatch(buffer)
    assert plan() is None


def test_what_is_not_there_names_what_to_use() -> None:
    buffer = Buffer(world())
    for call in (buffer.internode_combine, buffer.internode_dispatch):
        with pytest.raises(NotImplementedError, match="backend collective"):
            call(None, num_worst_tokens=4)


def test_arguments_of_branches_are_accepted_where_they_are_off() -> None:
    buffer = Buffer(world(), low_latency_mode=True, use_fabric=True)
    batch = Batch(buffer.rank, (32, 2, 4))
    arguments = (batch.x, batch.ids, 4, 4)
    slabs, _, handle, _, _ = buffer.low_latency_dispatch(
        *arguments, use_fp8=False, use_nvfp4=False, x_global_scale=None, topk_weights=None
    )
    rest = (batch.ids, batch.weights, handle)
    y, _, _ = buffer.low_latency_combine(
        slabs, *rest, overlap=False, block_m=64, threshold=8, num_sms=3
    )
    assert torch.equal(y, batch.x)
    given = torch.ones(1, device=here())
    for method, first, names in (
        (buffer.low_latency_dispatch, arguments, ("use_nvfp4", "x_global_scale", "topk_weights")),
        (
            buffer.low_latency_combine,
            (slabs, *rest),
            ("overlap", "packed_recv_count", "comp_signal", "src_signals"),
        ),
    ):
        for name in names:
            with pytest.raises(NotImplementedError, match=f"{name}.* is not available"):
                method(*first, **{name: given})


def test_events_work_where_there_is_no_cuda() -> None:
    event = EventOverlap(EventHandle())
    event.current_stream_wait()
    with Buffer.capture() as captured:
        assert captured.event is not None
    with pytest.raises(AssertionError, match="async_finish or capture"):
        EventOverlap().current_stream_wait()
