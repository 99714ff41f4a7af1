from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from epcomm import ShapeError
from epcomm.kernels import cuda_jit
from epcomm.kernels.gemm import fp8_hopper
from epcomm.kernels.gemm.operands import Product
from epcomm.runners.fp8_triton import Fp8TritonRunner, Mxfp8TritonRunner
from epcomm.runners.fp8_wgmma import Fp8WgmmaRunner
from epcomm.runners.gpu_slots import GpuSlotsRunner
from epcomm.runners.int8_triton import Int8TritonRunner
from epcomm.weights.quantized import QuantizedWeights
from epcomm.weights.unquantized import ExpertWeights

# Not importorskip: tests/kernels must choose an interpreter before triton is imported.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

HIDDEN, INNER = 256, 128
CODES = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    """Make tensors of the test report a GPU as their device, without memory."""
    with FakeTensorMode():
        yield


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def apart(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the rows with gaps between them."""
    strides = (num_columns + 16, 1)
    return torch.empty_strided((num_rows, num_columns), strides, dtype=dtype, device="cuda")


def make_weights(runner: type[GpuSlotsRunner]) -> QuantizedWeights:
    empty = partial(torch.empty, dtype=torch.bfloat16)
    plain = ExpertWeights(
        gate_up_proj=empty(2, 2 * INNER, HIDDEN), down_proj=empty(2, HIDDEN, INNER)
    )
    (kind,) = runner.kinds
    assert issubclass(kind, QuantizedWeights)
    weights = kind.from_unquantized(plain)
    tensors = weights.tensors().items()
    return weights.with_tensors({name: on_gpu(*t.shape, dtype=t.dtype) for name, t in tensors})


DEVICES = [
    (Fp8TritonRunner, (8, 6), ("compute capability is (8, 6), expected at least (8, 9)",)),
    (Fp8TritonRunner, (8, 9), ()),
    (Fp8TritonRunner, (12, 0), ()),
    (Int8TritonRunner, (7, 5), ("compute capability is (7, 5), expected at least (8, 0)",)),
    (Int8TritonRunner, (8, 0), ()),
    (Int8TritonRunner, (12, 0), ()),
    (Fp8WgmmaRunner, (8, 9), ("compute capability is (8, 9), expected (9, 0)",)),
    (Fp8WgmmaRunner, (9, 0), ()),
    (Fp8WgmmaRunner, (10, 0), ("compute capability is (10, 0), expected (9, 0)",)),
    (Mxfp8TritonRunner, (9, 0), ()),
    (Mxfp8TritonRunner, (10, 0), ("compute capability is (10, 0), expected (9, 0)",)),
]


def has_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(("runner", "capability", "reasons"), DEVICES)
def test_capability_decides(
    runner: type[GpuSlotsRunner],
    capability: tuple[int, int],
    reasons: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_capability(monkeypatch, capability)
    monkeypatch.setattr(cuda_jit, "nvrtc_is_installed", lambda: True)
    verdict = runner.supports(make_weights(runner))
    assert verdict.reasons == reasons
    assert verdict.ok == (not reasons)


def test_wgmma_needs_its_compiler_and_short_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    has_capability(monkeypatch, (9, 0))
    monkeypatch.setattr(cuda_jit, "nvrtc_is_installed", lambda: False)
    weights = replace(make_weights(Fp8WgmmaRunner), hidden_dtype=torch.float32)
    assert Fp8WgmmaRunner.supports(weights).reasons == (
        "hidden states are torch.float32, expected bfloat16 or float16",
        "NVRTC is not installed",
    )
    monkeypatch.setattr(cuda_jit, "nvrtc_is_installed", lambda: True)
    for dtype in (torch.bfloat16, torch.float16):
        assert Fp8WgmmaRunner.supports(replace(make_weights(Fp8WgmmaRunner), hidden_dtype=dtype)).ok


def gate_up_operands(num_slots: int = 5, num_rows: int = 7) -> dict[str, Tensor]:
    weights = make_weights(Fp8WgmmaRunner)
    return {
        "codes": apart(num_rows, HIDDEN, dtype=CODES),
        "scales": apart(num_rows, 2),
        "row_of_slot": on_gpu(num_slots, dtype=torch.int32),
        "counts": on_gpu(2, dtype=torch.int32),
        "first_slot": on_gpu(3, dtype=torch.int32),
        "matrices": weights.gate_up_proj,
        "matrix_scales": weights.gate_up_scale,
        "out_codes": on_gpu(num_slots, INNER, dtype=CODES),
        "out_scales": on_gpu(num_slots, 1),
    }


def down_operands(num_slots: int = 5) -> dict[str, Tensor]:
    weights = make_weights(Fp8WgmmaRunner)
    return {
        "codes": on_gpu(num_slots, INNER, dtype=CODES),
        "scales": on_gpu(num_slots, 1),
        "counts": on_gpu(2, dtype=torch.int32),
        "first_slot": on_gpu(3, dtype=torch.int32),
        "matrices": weights.down_proj,
        "matrix_scales": weights.down_scale,
        "slot_weights": on_gpu(num_slots),
        "out": on_gpu(num_slots, HIDDEN, dtype=torch.bfloat16),
    }


PRODUCTS = {
    "gate_up": (fp8_hopper.gate_up_fp8, gate_up_operands),
    "down": (fp8_hopper.down_fp8, down_operands),
}
OPERANDS = [
    (product, name)
    for product, names in {
        "gate_up": "codes scales row_of_slot counts first_slot matrices matrix_scales out_codes "
        "out_scales",
        "down": "codes scales counts first_slot matrices matrix_scales slot_weights out",
    }.items()
    for name in names.split()
]


def launch(product: str, operands: Mapping[str, Tensor]) -> None:
    """Launch a product on its operands; some of them are fields of a Product."""
    fields = {name for name in operands if name in Product.__dataclass_fields__}
    given = Product(**{name: operands[name] for name in fields})
    PRODUCTS[product][0](given, **{n: each for n, each in operands.items() if n not in fields})


def spread(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape with doubled strides."""
    strides = [2 * stride for stride in torch.empty(tensor.shape, device="meta").stride()]
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cuda")


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor with one more element in the last dimension."""
    return tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 1)


# Changes of a tensor, with the message of the refusal.
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dtype": (
        lambda tensor: tensor.new_empty(tensor.shape, dtype=torch.int64),
        "is torch.int64 on",
    ),
    "device": (lambda tensor: tensor.new_empty(tensor.shape, device="cpu"), "cpu, expected "),
    "order": (spread, "with strides"),
    "shape": (widened, "with strides"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("product", "name"), OPERANDS)
def test_wgmma_refuses_operands_that_it_would_misread(product: str, name: str, change: str) -> None:
    change_of, message = CHANGES[change]
    operands = PRODUCTS[product][1]()
    operands[name] = change_of(operands[name])
    with pytest.raises(ShapeError) as caught:
        launch(product, operands)
    text = str(caught.value)
    assert text.startswith("fp8_wgmma: ")
    assert message in text
    # Sizes are taken from these operands, so others are reported.
    if (name, change) not in {("matrices", "shape"), ("out_codes", "shape")}:
        assert text.startswith(f"fp8_wgmma: {name} ")


@pytest.mark.parametrize("product", PRODUCTS)
def test_wgmma_launches_nothing_where_there_are_no_slots(
    product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitate a rank that receives nothing, because the copy engine refuses a matrix of no rows."""

    def refuse(*_: object) -> None:
        raise AssertionError("no slots, no work")

    for name in ("_kernels", "byte_matrix_map", "_rows"):
        monkeypatch.setattr(fp8_hopper, name, refuse)
    make = PRODUCTS[product][1]
    launch(product, make(0))
    with pytest.raises(AssertionError, match="no slots"):
        launch(product, make(1))


def test_wgmma_has_no_more_blocks_than_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = MagicMock(num_sms=132)
    monkeypatch.setattr(fp8_hopper, "_kernels", lambda index: kernels)
    monkeypatch.setattr(fp8_hopper, "_rows", lambda given: fp8_hopper._Rows(num_experts=2))
    monkeypatch.setattr(fp8_hopper, "byte_matrix_map", lambda *_: None)
    monkeypatch.setattr(fp8_hopper, "on_device", nullcontext)
    monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: 0)
    for limit in (None, 1, 7, 132):
        for product, options in (("gate_up", {}), ("down", {"after": fp8_hopper.Begun()})):
            operands = PRODUCTS[product][1](num_slots=128 * 200)
            launch(product, {**operands, "num_sms": limit, **options})
    gate_up, down = (each[0].launch.call_args_list for each in (kernels.gate_up, kernels.down))
    assert [each.args[0] for each in gate_up] == [132, 1, 7, 132]
    # A kernel that begins early would wait on the SMs that the limit leaves.
    launched = [(each.args[0], each.kwargs["is_early"]) for each in down]
    assert launched == [(132, True), (1, False), (7, False), (132, False)]
