"""Products with EPConfig.product_sms have the bits of products without, on no more programs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from epcomm.quantization import FP8_FLOAT32_SCALES, INT8_PER_TOKEN
from epcomm.runners import grouped_mm
from epcomm.runners.base import ExpertRunner
from epcomm.runners.fp8_triton import Fp8TritonRunner, Mxfp8TritonRunner
from epcomm.runners.int8_triton import Int8TritonRunner
from epcomm.types import WireFormat
from epcomm.weights.quantized import Fp8BlockWeights, Int8ChannelWeights, Mxfp8Weights
from epcomm.weights.unquantized import ExpertTensors
from tests.kernels.gemm import slot_records
from tests.runners.records import results_of_experts
from tests.runners.test_batch_invariance import InTiles, needs_triton

SIZE, NUM_SMS, CPU = 256, 132, torch.device("cpu")
PLAIN = slot_records.make_weights(SIZE, SIZE, CPU)
HALF = PLAIN.with_tensors({name: each.half() for name, each in PLAIN.tensors().items()})
CASES: dict[str, tuple[ExpertRunner, ExpertTensors, WireFormat]] = {
    "fp8": (Fp8TritonRunner(), Fp8BlockWeights.from_unquantized(PLAIN), FP8_FLOAT32_SCALES),
    "mxfp8": (Mxfp8TritonRunner(), Mxfp8Weights.from_unquantized(PLAIN), Mxfp8Weights.block_format),
    "int8": (Int8TritonRunner(), Int8ChannelWeights.from_unquantized(PLAIN), INT8_PER_TOKEN),
    "multiply": (InTiles(), HALF, WireFormat.of(torch.float16)),
}


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted there")
@pytest.mark.parametrize("name", CASES)
def test_limits_bound_programs_and_keep_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    runner, weights, wire = CASES[name]
    case = slot_records.Case(dtype=weights.dtype, is_quantized=wire.dtype.is_quantized)
    dispatched = slot_records.record(case, SIZE, wire, CPU)
    grids: list[int] = []
    launch = InterpretedFunction.__getitem__

    def record_grid(kernel: Any, grid: tuple[int, ...]) -> object:  # noqa: ANN401
        if kernel.fn.__name__.startswith(("_gate_up", "_down", "_multiply")):
            grids.append(grid[0])
        return launch(kernel, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", record_grid)
    found = []
    for limit in (None, 1, 7, NUM_SMS):
        monkeypatch.setattr(runner, "product_sms", limit)
        results = runner.run(dispatched, weights).hidden_states
        found.append(torch.cat(results_of_experts(dispatched, results)))
    assert all(torch.equal(each, found[0]) for each in found)
    most = grids[:2]
    assert min(most) > 7
    assert grids[2:] == [min(limit, tiles) for limit in (1, 7, NUM_SMS) for tiles in most]


@pytest.mark.parametrize("is_transposed", [False, True])
def test_torch_has_the_limit_forward_and_backward(
    is_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, product = [], grouped_mm.grouped_mm

    def multiply(*args: Tensor, offs: Tensor) -> Tensor:
        free.append(torch._C._get_sm_carveout_experimental())
        return product(*args, offs=offs)

    monkeypatch.setattr(grouped_mm, "num_sms_of", lambda device: NUM_SMS)
    generator = torch.Generator().manual_seed(1)
    slots, stored = (torch.randn(shape, generator=generator) for shape in ((8, 16), (3, 32, 16)))
    leaves = [slots.requires_grad_(), (stored if is_transposed else stored.mT.contiguous())]
    leaves[1].requires_grad_()
    matrices = leaves[1].mT if is_transposed else leaves[1]
    found = []
    for limit in (None, 100, 200):
        ends = torch.tensor([3, 3, 8], dtype=torch.int32)
        result = grouped_mm._product(slots, matrices, ends, None, limit)
        found.append([result, *torch.autograd.grad(result.square().sum(), leaves)])
        assert all(map(torch.equal, found[-1], found[0]))
        monkeypatch.setattr(grouped_mm, "grouped_mm", multiply)
    assert free == [32, 32, 32, 0, 0, 0]
    assert torch._C._get_sm_carveout_experimental() is None
