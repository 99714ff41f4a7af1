"""Check that the bits of a row depend on no other row, for runners that declare it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm import WireTensor
from epcomm.quantization import quantize
from epcomm.records import SlotIndex
from epcomm.runners.base import ExpertRunner
from epcomm.testing.oracle import relative_error
from epcomm.testing.poison import poisoned_memory
from epcomm.types import Layout, WeightsAppliedBy, WireFormat, align_up
from epcomm.weights.unquantized import ExpertTensors
from tests.runners.records import Record, as_masked, results_of_experts, rows_record


@dataclass(frozen=True, kw_only=True)
class Batch:
    """rows_of_expert: the rows of the pool that each expert computes, in the order of slots."""

    id: str
    rows_of_expert: tuple[Tensor, ...]
    layout: Layout = Layout.ROWS
    expert_alignment: int = 1
    has_index: bool = True

    @property
    def counts(self) -> list[int]:
        return [len(rows) for rows in self.rows_of_expert]


def batches(counts: Sequence[int], pool_size: int, num_experts: int) -> Iterator[Batch]:
    """For each count, let one expert compute that many rows of the pool, others other numbers."""
    generator = torch.Generator().manual_seed(5)
    for number, count in enumerate(counts):
        expert = number % num_experts
        others = [(7 * number + 3 * other) % 13 for other in range(num_experts)]
        others[expert] = count
        rows = tuple(
            torch.randperm(pool_size, generator=generator, device="cpu")[:each] for each in others
        )
        forms = [
            {},
            {"layout": Layout.MASKED},
            {"expert_alignment": 8},
            {"expert_alignment": 8, "has_index": False},
            {"has_index": False},
        ]
        yield Batch(id=f"counts {others}, {number % 5}", rows_of_expert=rows, **forms[number % 5])


def record_of(batch: Batch, pool: WireTensor, *, needs_backward: bool) -> Record:
    """Make the record of a batch, whose unused rows are NaN or the code 127."""
    device = pool.data.device
    starts = [0]
    for count in batch.counts:
        starts.append(starts[-1] + align_up(count, batch.expert_alignment))
    # A tail that no expert computes, as a static buffer has.
    num_slots = starts[-1] + (0 if batch.expert_alignment == 1 else 8)
    row_of_slot = torch.full((num_slots,), -1, dtype=torch.int32)
    for start, rows in zip(starts, batch.rows_of_expert, strict=False):
        row_of_slot[start : start + len(rows)] = rows.to(torch.int32)
    is_dense = bool((row_of_slot >= 0).all())

    def poisoned(values: Tensor) -> Tensor:
        """Append a row of poison to the pool, and read it for padding."""
        is_code = values.itemsize == 1
        raw = values.view(torch.uint8) if is_code else values
        poison = raw.new_full((1, raw.shape[1]), 0x7F if is_code else float("nan"))
        raw = torch.cat([raw, poison])
        if not batch.has_index:
            raw = raw[row_of_slot.long().to(device)]
        return raw.view(values.dtype) if is_code else raw

    index = SlotIndex(
        row_of_slot=row_of_slot.to(device) if batch.has_index else None,
        slots_of_row=_slots_of_row(row_of_slot, len(pool.data) + 1).to(device)
        if batch.has_index
        else None,
        num_tokens_per_expert=torch.tensor(batch.counts, dtype=torch.int32, device=device),
        first_slot=torch.tensor(starts, dtype=torch.int32, device=device),
        host_num_tokens_per_expert=tuple(batch.counts),
        expert_alignment=batch.expert_alignment,
        is_dense=is_dense,
    )
    scales = None if pool.scales is None else poisoned(pool.scales)
    rows = WireTensor(data=poisoned(pool.data), format=pool.format, scales=scales)
    if needs_backward:
        rows.data.requires_grad_()
    record: Record = rows_record(
        rows, index, None, WeightsAppliedBy.COMBINE, needs_backward=needs_backward
    )
    if batch.layout is Layout.MASKED:
        record = as_masked(record, capacity=align_up(max(batch.counts) + 1, 8))
    return record


def _slots_of_row(row_of_slot: Tensor, num_rows: int) -> Tensor:
    """Return the slots of each row, [num_rows, K], in ascending order."""
    found: list[list[int]] = [[] for _ in range(num_rows)]
    for slot, row in enumerate(row_of_slot.tolist()):
        if row >= 0:
            found[row].append(slot)
    width = max(1, *map(len, found))
    return torch.tensor([each + [-1] * (width - len(each)) for each in found], dtype=torch.int32)


def check_batch_invariance(
    runner: ExpertRunner,
    weights: ExpertTensors,
    counts: Sequence[int],
    wire: WireFormat,
    pool_size: int | None = None,
) -> None:
    """Compare each row with its result in one large batch: alone, elsewhere, with other rows.

    Where the runner has gradients, the gradient of a row is compared too.
    """
    device = weights.gate_up_proj.device
    size = max(*counts, 13) if pool_size is None else pool_size
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(
        2, size, weights.hidden_size, generator=generator, dtype=torch.float32, device="cpu"
    )
    x, grad = hidden.to(device, weights.dtype).unbind()
    pool, num_experts = quantize(x, wire), weights.num_experts
    everything = Batch(
        id="all", rows_of_expert=(torch.arange(size, device="cpu"),) * num_experts, has_index=False
    )
    has_gradients = runner.has_gradients and not wire.dtype.is_quantized
    expected = _compute(runner, weights, everything, pool, grad, has_gradients=has_gradients)
    for batch in batches(counts, size, num_experts):
        # Gradients are sums over the slots of a row where there is an index.
        separate = has_gradients and not batch.has_index
        actual = _compute(runner, weights, batch, pool, grad, has_gradients=separate)
        for name, found in actual.items():
            for expert, rows in enumerate(batch.rows_of_expert):
                wanted = expected[name][expert][rows.to(device)]
                wrong = (found[expert] != wanted).any(dim=1)
                assert not wrong.any(), (
                    f"{runner.name}, {batch.id}: {name} of {int(wrong.sum())} of {len(rows)} rows "
                    f"of expert {expert} differ, the first in position {int(wrong.int().argmax())}"
                )


def _compute(
    runner: ExpertRunner,
    weights: ExpertTensors,
    batch: Batch,
    pool: WireTensor,
    grad: Tensor,
    *,
    has_gradients: bool,
) -> dict[str, list[Tensor]]:
    """Return results by expert, and gradients of the rows."""
    record = record_of(batch, pool, needs_backward=has_gradients)
    with poisoned_memory(), torch.set_grad_enabled(has_gradients):
        results = runner.run(record, weights).hidden_states
    found = {"results": results_of_experts(record, results.detach())}
    if has_gradients:
        # Gradients of padding are NaN, because nobody reads its results.
        sent = torch.full_like(results, float("nan"))
        for rows, part in zip(batch.rows_of_expert, results_of_experts(record, sent), strict=True):
            part.copy_(grad[rows.to(grad.device)])
        with poisoned_memory():
            results.backward(sent)
        gradient = record.hidden_states.data.grad
        found["gradients"] = results_of_experts(record, gradient)
    return found


def check_close(runner: ExpertRunner, plain: ExpertRunner, weights: ExpertTensors) -> None:
    wire = WireFormat.of(weights.dtype)
    device, generator = weights.gate_up_proj.device, torch.Generator().manual_seed(8)
    hidden = torch.randn(2, 150, weights.hidden_size, generator=generator, device="cpu")
    x, grad = hidden.to(device, weights.dtype).unbind()
    for batch in batches((3, 140, 9, 5, 8), 150, weights.num_experts):
        if batch.layout is Layout.MASKED:
            continue
        found = []
        for each in (runner, plain):
            tensors = {n: t.clone().requires_grad_() for n, t in weights.tensors().items()}
            mine, has_gradients = weights.with_tensors(tensors), not batch.has_index
            parts = _compute(
                each, mine, batch, quantize(x, wire), grad, has_gradients=has_gradients
            )
            flat = {name: torch.cat(values) for name, values in parts.items()}
            if has_gradients:
                flat |= {name: t.grad for name, t in tensors.items() if t.grad is not None}
            found.append(flat)
        assert found[0].keys() == found[1].keys()
        for name, actual in found[0].items():
            # Rows are rounded three times, at most to bfloat16.
            assert relative_error(actual, found[1][name]) <= 3 * 2**-8, (batch.id, name)


def without_gradients(weights: ExpertTensors) -> ExpertTensors:
    return weights.with_tensors({name: t.detach() for name, t in weights.tensors().items()})
