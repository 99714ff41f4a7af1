import pytest
import torch
from torch import Tensor

from epcomm import EPGroup
from epcomm.buffers.base import AddsBias
from epcomm.calls.call import DispatchCall
from epcomm.ops import slots as kernels_by_device
from epcomm.protocol import BatchFlags
from epcomm.types import RowsPer
from tests.cases.specs import buffer_spec

NUM_TOKENS, HIDDEN, TOP_K, NUM_LOCAL = 6, 72, 3, 2
BUFFERS = (
    "CollectiveBuffer",
    "SharedMemoryBuffer",
    "StaticCollectiveBuffer",
    pytest.param("NVLinkBuffer", marks=pytest.mark.slow),
)
CPU_BUFFERS = ("SharedMemoryBuffer",)


def results_of(x: Tensor, rank: int) -> Tensor:
    """Return the results of a rank for its rows: bfloat16 numbers with many significant bits.

    Those of rank 0 are so large that float32 loses the bits of the others in their sum.
    """
    return (x.float() * (rank + 1) / 7 * (2**20 if rank == 0 else 1)).to(x.dtype)


def expected_y(bias: Tensor, x: Tensor, topk_ids: Tensor, num_ranks: int) -> Tensor:
    """Return bias plus the ranks of each token in order, summed in float32 and rounded once."""
    total = bias.clone()
    for rank in range(num_ranks):
        is_sent = (topk_ids >= 0).logical_and(topk_ids // NUM_LOCAL == rank).any(1, keepdim=True)
        total += torch.where(is_sent, results_of(x, rank).float(), 0.0)
    return total.to(x.dtype)


def call_of(group: EPGroup) -> DispatchCall:
    generator = torch.Generator().manual_seed(7 + group.rank)
    # Batches in which ranks have different numbers of tokens.
    num_tokens = NUM_TOKENS - group.rank
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(torch.bfloat16)
    scores = torch.rand(num_tokens, NUM_LOCAL * group.world_size, generator=generator)
    ids = scores.topk(TOP_K, dim=1).indices
    # The y of a token without a rank is its bias.
    ids[1] = -1
    return DispatchCall(
        hidden_states=x.to(group.device),
        topk_ids=ids.to(group.device),
        topk_weights=torch.rand(ids.shape, generator=generator).to(group.device),
        flags=BatchFlags.GRAD_ENABLED,
    )


def check_bias(name: str) -> None:
    with EPGroup() as group:
        if name in CPU_BUFFERS and group.device.type != "cpu":
            return
        spec = buffer_spec(HIDDEN, TOP_K, NUM_LOCAL, NUM_TOKENS)
        buffer, call = group.open_buffer(name, spec), call_of(group)
        assert isinstance(buffer, AddsBias)
        out = buffer.dispatch(call)
        x, ids = call.unquantized, call.topk_ids
        rows = results_of(out.rows.data, group.rank)
        # A sum that begins with it keeps those bits.
        bias = torch.randn(x.shape, generator=torch.Generator().manual_seed(group.rank))
        bias -= results_of(x.cpu(), 0).float()
        expected = expected_y(bias, x.cpu(), ids.cpu(), group.world_size).to(group.device)
        bias = bias.to(group.device)
        scalars = torch.ones(rows.shape[0], TOP_K, device=group.device)
        for row_scalars in (None, scalars):
            y, _ = buffer.combine(
                rows, out.exchange_plan, rows_per=RowsPer.ROW, row_scalars=row_scalars, bias=bias
            )
            assert torch.equal(y, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BUFFERS)
def test_a_bias_begins_the_sums(name: str) -> None:
    if name.startswith("NVLink"):
        pytest.importorskip("triton")
    check_bias(name)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_bias_begins_the_sums_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(kernels_by_device._LOADERS, "cpu", kernels_by_device._LOADERS["cuda"])
    for name in ("CollectiveBuffer", "StaticCollectiveBuffer"):
        check_bias(name)
