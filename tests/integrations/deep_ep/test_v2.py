import ast
import copy
import inspect
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from epcomm.errors import CapacityError, HandleError, ShapeError
from epcomm.integrations.deep_ep import ElasticBuffer, EventHandle
from epcomm.integrations.deep_ep.checks import Absent
from epcomm.integrations.deep_ep.normal import RowExchange
from epcomm.integrations.deep_ep.ranks import Ranks
from tests.integrations.deep_ep.devices import here, on_gpus
from tests.integrations.deep_ep.v2_ranks import (
    CASES,
    HIDDEN,
    MAX_TOKENS,
    NUM_EXPERTS,
    NUM_TOPK,
    SIGNATURES,
    TWO_MB,
    UNEVEN,
    BufferMaker,
    dispatch,
    inputs_here,
    num_messages,
    run_recorded_case,
    world,
)

pytestmark = pytest.mark.ranks(4)
METHODS: dict[str, Any] = json.loads(SIGNATURES.read_text("utf-8"))["methods"]


def is_absent(method: str) -> bool:
    return isinstance(inspect.getattr_static(ElasticBuffer, method), Absent)


@pytest.mark.parametrize("method", [m for m in METHODS if not is_absent(m)])
def test_signatures_are_those_of_the_package(method: str) -> None:
    described = METHODS[method]
    found = inspect.getattr_static(ElasticBuffer, method)
    assert isinstance(found, staticmethod) is described["static"]
    parameters = inspect.signature(getattr(ElasticBuffer, method)).parameters
    expected = {
        each["name"]: default_of(each["default"]) if "default" in each else inspect.Parameter.empty
        for each in described["parameters"]
    }
    assert {name: each.default for name, each in parameters.items()} == expected
    assert list(parameters) == list(expected)


def ranks_of_tokens(topk_idx: Tensor) -> Tensor:
    """Return how many ranks each token goes to, [T, 1], bfloat16."""
    counts = [[len({e // 2 for e in row if e >= 0})] for row in topk_idx.tolist()]
    return torch.tensor(counts, dtype=torch.bfloat16, device=here()).view(-1, 1)


def default_of(source: str) -> object:
    return torch.bfloat16 if source == "torch.bfloat16" else ast.literal_eval(source)


@pytest.mark.parametrize("name", CASES)
def test_recorded_case(name: str, make_buffer: BufferMaker) -> None:
    run_recorded_case(name, make_buffer)


@pytest.mark.parametrize("is_col_major", [False, True])
def test_scales_are_opaque_words_of_any_strides(is_col_major: bool, buffer: ElasticBuffer) -> None:
    x, _, _ = inputs_here(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    words = torch.arange(4 * len(x), dtype=torch.int32, device=here()).reshape(4, len(x))
    words = (words + 1000 * buffer.rank_idx).T
    (codes, recv_sf), _, _, handle, _ = dispatch(
        buffer,
        (x.to(torch.float8_e4m3fn), words),
        do_expand=True,
        use_tma_aligned_col_major_sf=is_col_major,
    )
    num_rows = len(codes)
    aligned = -(-num_rows // 4) * 4
    assert recv_sf.stride() == ((1, aligned) if is_col_major else (4, 1))
    assert recv_sf.dtype == torch.int32
    for source, _, *slots in handle.recv_src_metadata.tolist():
        src_rank, token = divmod(source, MAX_TOKENS)
        num_tokens = UNEVEN[src_rank]["inputs"]["T"]
        expected = [1000 * src_rank + token + word * num_tokens for word in range(4)]
        for slot in slots:
            if slot >= 0:
                assert recv_sf[slot].tolist() == expected
                assert codes[slot].float()[0] == src_rank


@pytest.mark.parametrize(("do_expand", "do_cpu_sync"), [(True, False), (False, True)])
def test_cached_routes_keep_rows(do_expand: bool, do_cpu_sync: bool, buffer: ElasticBuffer) -> None:
    first_x, first_idx, _, handle, _ = dispatch(
        buffer, do_expand=do_expand, do_cpu_sync=do_cpu_sync
    )
    x, _, _ = inputs_here(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    for _ in range(2):
        again_x, again_idx, weights, again, _ = dispatch(
            buffer, x * 2, handle=handle, do_expand=do_expand
        )
        assert again is handle
        assert weights is None
        # Rows after the received ones are undefined, as is padding in expanded layouts of static
        # sizes.
        count = (
            int(handle.psum_num_recv_tokens_per_expert[-1]) if do_expand else num_messages(handle)
        )
        assert torch.equal(again_x[:count], first_x[:count] * 2)
        if not do_expand:
            assert torch.equal(first_idx, again_idx)
            assert (first_idx[count:] == -1).all()


def other_weights(rank: int) -> Tensor:
    """Return weights [T, K] of a rank that identify rank, token and k."""
    topk_idx = inputs_here(UNEVEN[rank], rank)[1]
    numbers = torch.arange(topk_idx.numel(), dtype=torch.float32, device=here())
    return 100.0 * (rank + 1) + numbers.view(topk_idx.shape)


@pytest.mark.parametrize(("is_twice", "do_cpu_sync"), [(True, False), (False, True)])
def test_weights_travel_along_an_expanded_handle_and_back(
    is_twice: bool, do_cpu_sync: bool, make_buffer: BufferMaker
) -> None:
    buffer = make_buffer(allow_multiple_reduction=is_twice)
    rank = buffer.rank_idx
    x, topk_idx, _ = inputs_here(UNEVEN[rank], rank)
    first_x, _, first_weights, handle, _ = dispatch(
        buffer, do_expand=True, do_cpu_sync=do_cpu_sync, expert_alignment=4
    )
    new = other_weights(rank)
    rows, ids, weights, again, _ = dispatch(
        buffer,
        x * 2,
        handle=handle,
        topk_weights=new,
        do_expand=True,
        do_zero_padding=True,
        num_experts=None,
    )
    assert ids is None
    assert again is handle
    assert weights.shape == first_weights.shape == (handle.num_expanded_tokens,)
    # Combine before the metadata is read, and after.
    for _ in range(2):
        y, back, _ = buffer.combine(rows, handle, topk_weights=weights)
        assert torch.equal(back, torch.where(topk_idx >= 0, new, 0.0))
        experts = (topk_idx >= 0).sum(1, keepdim=True)
        assert torch.equal(y, x * 2 * experts)
        assert handle.recv_src_metadata.dtype is torch.int32
    seen = torch.zeros(len(weights), dtype=torch.bool, device=here())
    for source, _, *slots in handle.recv_src_metadata[: num_messages(handle)].tolist():
        src_rank, token = divmod(source, MAX_TOKENS)
        for k, slot in enumerate(slots):
            if slot >= 0:
                assert weights[slot] == other_weights(src_rank)[token, k]
                assert torch.equal(rows[slot], first_x[slot] * 2)
                seen[slot] = True
    # The other positions are padding.
    assert not weights[~seen].any()
    assert not rows[~seen].any()


@pytest.mark.parametrize(("is_expanded", "do_cpu_sync"), [(True, False), (False, True)])
def test_rows_and_weights_along_a_handle_that_are_not_expanded(
    is_expanded: bool, do_cpu_sync: bool, buffer: ElasticBuffer
) -> None:
    rank = buffer.rank_idx
    new = other_weights(rank)
    expected = dispatch(buffer, topk_weights=new, do_cpu_sync=do_cpu_sync)
    handle = dispatch(buffer, do_cpu_sync=do_cpu_sync, do_expand=is_expanded)[3]
    x, _, _ = inputs_here(UNEVEN[rank], rank)
    found = buffer.dispatch(x, topk_weights=new, handle=handle, num_sms=8)
    count = num_messages(handle)
    for mine, other in zip(found[:3], expected[:3], strict=True):
        assert isinstance(mine, Tensor)
        assert mine.shape == other.shape
        assert torch.equal(mine[:count], other[:count])
    assert buffer.dispatch(x, handle=handle, num_sms=8)[2] is None


@pytest.mark.parametrize(("is_twice", "do_cpu_sync"), [(True, False), (False, True)])
def test_combine_takes_the_rows_that_recv_src_metadata_names(
    is_twice: bool, do_cpu_sync: bool, make_buffer: BufferMaker
) -> None:
    buffer = make_buffer(allow_multiple_reduction=is_twice)
    rank = buffer.rank_idx
    x, topk_idx, _ = inputs_here(UNEVEN[rank], rank)
    by_token = dispatch(buffer, do_cpu_sync=do_cpu_sync)[0]
    handle = dispatch(buffer, do_cpu_sync=do_cpu_sync, do_expand=True)[3]
    # A program sums the experts of a token itself, and has one row for each token.
    metadata = handle.recv_src_metadata.clone()
    metadata[:, 2] = torch.arange(len(metadata), device=here())
    metadata[:, 3:] = -1
    handle.recv_src_metadata = metadata
    expected = x * ranks_of_tokens(topk_idx)
    assert torch.equal(buffer.combine(by_token, handle)[0], expected)
    # Write in place, in another order, and without lines after the received tokens.
    count = num_messages(handle)
    handle.recv_src_metadata = metadata[:count]
    handle.recv_src_metadata[:, 2] = torch.arange(count, device=here()).flip(0)
    weights = torch.full((count,), 0.5 + rank, device=here())
    y, back, _ = buffer.combine(by_token[:count].flip(0), handle, topk_weights=weights)
    assert torch.equal(y, expected)
    # Rank r returns 0.5 + r for the first k, whichever expert of its tokens it is.
    assert torch.equal(back[:, 1:], torch.zeros_like(back[:, 1:]))
    is_first = topk_idx[:, 0] >= 0
    assert torch.equal(back[is_first, 0], 0.5 + topk_idx[is_first, 0].div(2, rounding_mode="floor"))


EXCHANGES = ("dispatch", "cached_dispatch", "combine")


@contextmanager
def counted_exchanges(exchange: RowExchange) -> Iterator[list[str]]:
    """Yield the names of the exchanges that this rank begins on the buffer of `exchange`.

    Each exchange raises an error before it waits for another rank.
    """
    begun: list[str] = []

    def refuse(name: str) -> Callable[..., None]:
        def begin(*_: object, **__: object) -> None:
            begun.append(name)
            raise AssertionError(f"{name} communicates")

        return begin

    kind = type(exchange.buffer)
    with ExitStack() as patches:
        for owner, names in ((Ranks, ("gather", "announce")), (kind, EXCHANGES)):
            for name in names:
                patches.enter_context(patch.object(owner, name, refuse(name)))
        yield begun


@pytest.mark.parametrize("do_cpu_sync", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("do_expand", [False, True])
def test_a_rank_alone_reads_compares_and_saves_a_handle(
    do_expand: bool, has_weights: bool, do_cpu_sync: bool, buffer: ElasticBuffer
) -> None:
    x, topk_idx, weights = inputs_here(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    recv_x, _, _, handle, _ = dispatch(
        buffer,
        topk_weights=weights if has_weights else None,
        do_expand=do_expand,
        do_cpu_sync=do_cpu_sync,
    )
    # If a read communicated, rank 0 would wait, or meet the combine of the others.
    if buffer.rank_idx == 0:
        with counted_exchanges(handle.exchange) as exchanges:
            for name in dir(handle):
                getattr(handle, name)
            assert repr(handle) == str(handle)
            assert handle == handle
            for use in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(HandleError, match="cannot be pickled or copied"):
                    use(handle)
        assert exchanges == []
    y, _, _ = buffer.combine(recv_x, handle)
    count = num_messages(handle)
    by_rank = handle.psum_num_recv_tokens_per_scaleup_rank.diff(prepend=torch.zeros(1).to(here()))
    metadata = handle.recv_src_metadata[:count].tolist()
    assert Counter(line[0] // MAX_TOKENS for line in metadata) == Counter(
        {rank: int(number) for rank, number in enumerate(by_rank) if number}
    )
    for position, (source, _, *slots) in enumerate(metadata):
        sent = torch.tensor(divmod(source, MAX_TOKENS), dtype=torch.bfloat16)
        for row in [slot for slot in slots if slot >= 0] if do_expand else [position]:
            assert torch.equal(recv_x[row, :2].cpu(), sent)
    times = (topk_idx >= 0).sum(1, keepdim=True) if do_expand else ranks_of_tokens(topk_idx)
    assert torch.equal(y, x * times)


def test_weights_and_biases_of_combine(buffer: ElasticBuffer) -> None:
    x, topk_idx, weights = inputs_here(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    recv_x, recv_idx, recv_weights, handle, _ = dispatch(buffer)
    assert recv_idx is not None
    assert recv_weights is not None
    # Only the rank of an expert returns its weight.
    own = torch.where(recv_idx >= 0, recv_weights, float("nan"))
    bias = torch.full_like(x, 3.0)
    combined, back, _ = buffer.combine(recv_x, handle, topk_weights=own, bias=(bias, bias))
    num_ranks = ranks_of_tokens(topk_idx)
    assert torch.equal(combined, x * num_ranks + 6)
    assert torch.equal(back, torch.where(topk_idx >= 0, weights, 0.0))


@pytest.mark.parametrize("is_twice", [True, False])
@pytest.mark.parametrize("do_expand", [False, True])
def test_biases_are_the_beginning_of_sums_that_are_rounded_once(
    do_expand: bool, is_twice: bool, make_buffer: BufferMaker
) -> None:
    buffer = make_buffer(allow_multiple_reduction=is_twice)
    # Experts 0 and 1 live on rank 0, 2 on rank 1; neighbours of 1 are 2**-7 apart in bfloat16.
    topk_idx = torch.tensor([[0, 1, 2]], device=here())
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, device=here())
    recv_x, _, _, handle, _ = dispatch(
        buffer, x, topk_idx=topk_idx, topk_weights=None, do_expand=do_expand
    )
    rows = recv_x * (2**-9 if buffer.rank_idx else 0.5 if do_expand else 1.0)
    biases = torch.full_like(x, 2**-9), torch.full_like(x, 2**-9 - 2**-17)
    combined, _, _ = buffer.combine(rows, handle, bias=biases)
    # 1 + 2**-9 + 2**-8 is above the midpoint; with an intermediate rounding the result would be 1.
    assert combined.unique().tolist() == [1 + 2**-7]


@pytest.mark.parametrize(("is_allowed", "expected"), [(True, 512.0), (False, 516.0)])
def test_expanded_rows_are_rounded_at_their_rank_if_allowed(
    is_allowed: bool, expected: float, make_buffer: BufferMaker
) -> None:
    buffer = make_buffer(allow_multiple_reduction=is_allowed)
    # Experts 0 and 1 live on rank 0, 2 on rank 1: 512 + 1.5 is rounded to 512 in bfloat16.
    topk_idx = torch.tensor([[0, 1, 2]], device=here())
    x = torch.full((1, HIDDEN), 1.5, dtype=torch.bfloat16, device=here())
    recv_x, _, _, handle, _ = dispatch(
        buffer, x, topk_idx=topk_idx, topk_weights=None, do_expand=True
    )
    if buffer.rank_idx == 0:
        end = int(handle.psum_num_recv_tokens_per_expert[0])
        recv_x[:end] = 512.0
    combined, _, _ = buffer.combine(recv_x, handle)
    assert combined.unique().tolist() == [expected]


def test_a_handle_keeps_a_copy_of_the_routes_unless_told_otherwise(buffer: ElasticBuffer) -> None:
    _, topk_idx, _ = inputs_here(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    assert dispatch(buffer, topk_idx=topk_idx)[3].topk_idx is not topk_idx
    assert dispatch(buffer, topk_idx=topk_idx, do_handle_copy=False)[3].topk_idx is topk_idx


def test_counts_are_added_to_the_statistics(buffer: ElasticBuffer) -> None:
    stats = torch.full((2,), 10, dtype=torch.int32, device=here())
    handle = dispatch(buffer, cumulative_local_expert_recv_stats=stats, expert_alignment=16)[3]
    assert torch.equal(stats, handle.num_unaligned_recv_tokens_per_expert + 10)


def test_ranks_without_tokens_and_tokens_without_experts(buffer: ElasticBuffer) -> None:
    num_tokens = 2 if buffer.rank_idx == 1 else 0
    x = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16, device=here())
    nowhere = torch.full((num_tokens, NUM_TOPK), -1, device=here())
    for do_expand in (False, True):
        recv_x, _, _, handle, _ = dispatch(
            buffer, x, topk_idx=nowhere, topk_weights=None, do_expand=do_expand, num_sms=0
        )
        assert handle.num_sms == buffer.get_theoretical_num_sms(NUM_EXPERTS, NUM_TOPK)
        assert recv_x.shape == (0, HIDDEN)
        combined, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(combined, torch.zeros_like(x))


@pytest.mark.parametrize("do_expand", [False, True])
def test_autograd_is_left_to_the_caller(do_expand: bool, buffer: ElasticBuffer) -> None:
    x, _, own_weights = inputs_here(UNEVEN[buffer.rank_idx], buffer.rank_idx)
    # Only one rank needs gradients, as if the others were frozen.
    x, own_weights = (each.requires_grad_(buffer.rank_idx == 0) for each in (x, own_weights))
    recv_x, _, weights, handle, _ = dispatch(
        buffer, x, topk_weights=own_weights, do_expand=do_expand
    )
    along = dispatch(
        buffer, x, handle=handle, do_expand=do_expand, topk_weights=own_weights.clone()
    )[0]
    assert not any(each.requires_grad for each in (recv_x, weights, along))
    y, sums, _ = buffer.combine(recv_x.requires_grad_(), handle, weights.requires_grad_())
    assert not y.requires_grad
    assert not sums.requires_grad


def test_events_order_calls_without_cuda(buffer: ElasticBuffer) -> None:
    event = EventHandle()
    recv_x, _, _, handle, overlap = dispatch(
        buffer,
        previous_event=event,
        previous_event_before_epilogue=buffer.capture(),
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )
    seen: list[int] = []
    overlap.register_hook_after_wait(lambda: seen.append(1))
    overlap.current_stream_wait(release_handle=True)
    assert seen == [1]
    assert overlap.event is None
    combined, _, overlap = buffer.combine(recv_x, handle, async_with_compute_stream=True)
    with overlap:
        assert combined.dtype is torch.bfloat16
    assert dispatch(buffer)[4].event is None


def test_bad_input_of_one_rank_is_an_error_on_every_rank(buffer: ElasticBuffer) -> None:
    rank = buffer.rank_idx
    # The first call of each kind chooses a buffer, which all ranks do together.
    dispatch(buffer)
    dispatch(buffer, do_cpu_sync=False)
    x, topk_idx, weights = inputs_here(UNEVEN[rank], rank)
    out_of_range = {"topk_idx": topk_idx + NUM_EXPERTS}
    too_many = {
        "x": x.new_zeros(MAX_TOKENS + 1, HIDDEN),
        "topk_idx": topk_idx.new_full((MAX_TOKENS + 1, NUM_TOPK), -1),
        "topk_weights": weights.new_zeros(MAX_TOKENS + 1, NUM_TOPK),
    }
    bad: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"topk_idx": topk_idx.int()}, ShapeError),
        ({"topk_weights": weights.double()}, ShapeError),
        (out_of_range, ShapeError),
        (too_many, CapacityError),
        ({"cumulative_local_expert_recv_stats": weights.new_zeros(7)}, ShapeError),
    ]
    for options, kind in bad:
        for do_cpu_sync in (True, False):
            given: dict[str, Any] = {**(options if rank == 1 else {}), "do_cpu_sync": do_cpu_sync}
            # Without CPU sync no host of a GPU reads what other ranks say, or its own ids.
            is_read = do_cpu_sync or not on_gpus()
            if is_read or (rank == 1 and options is not out_of_range):
                with pytest.raises(kind):
                    dispatch(buffer, **given)
            else:
                recv_x, _, _, handle, _ = dispatch(buffer, **given)
                assert buffer.combine(recv_x, handle)[0].isnan().all()
    # The buffer stays usable.
    recv_x, _, _, handle, _ = dispatch(buffer)
    combined, _, _ = buffer.combine(recv_x, handle)
    num_ranks = ranks_of_tokens(topk_idx)
    assert torch.equal(combined, x * num_ranks)


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda buffer: buffer.engram_write(torch.zeros(1)), "deep_ep package itself"),
        (lambda buffer: buffer.pp_send(torch.zeros(1), 0), "isend and irecv"),
        (lambda buffer: buffer.all_gather(torch.zeros(1)), "all_gather_into_tensor"),
    ],
)
def test_what_is_not_there_says_what_to_use(call: Any, instead: str) -> None:  # noqa: ANN401
    with pytest.raises(NotImplementedError, match=instead):
        call(ElasticBuffer.__new__(ElasticBuffer))


def test_sizes_domains_and_the_end(buffer: ElasticBuffer) -> None:
    group = world()

    def hint(max_tokens: int, hidden: int, num_topk: int = 0, **options: bool) -> int:
        size = ElasticBuffer.get_buffer_size_hint(group, max_tokens, hidden, num_topk, **options)
        assert size % TWO_MB == 0
        return size

    assert hint(1, 256) == TWO_MB
    assert hint(4096, 7168) > hint(2048, 7168) > hint(2048, 4096)
    assert hint(4096, 7168) > hint(4096, 7168, use_fp8_dispatch=True)
    assert hint(4096, 7168, 8, allow_multiple_reduction=False) > hint(4096, 7168, 8)
    assert hint(4096, 7168, 0) == hint(4096, 7168, 32)
    assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, 4)
    num_sms = buffer.get_theoretical_num_sms(256, 8)
    assert num_sms % 2 == 0
    assert 4 <= num_sms <= 132
    assert buffer.get_theoretical_num_qps(num_sms) <= buffer.num_allocated_qps
    buffer.barrier()
    assert buffer.get_comm_stream() is not None
    buffer.destroy()
    with pytest.raises(HandleError, match="destroyed"):
        dispatch(buffer)
    with pytest.raises(AssertionError):
        ElasticBuffer(group, num_bytes=TWO_MB).destroy()
