import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epcomm import (
    ConfigError,
    EPError,
    ExpertFormat,
    ExpertWeights,
    Fp8BlockWeights,
    Int8ChannelWeights,
    Mxfp4Weights,
    Mxfp8Weights,
    Nvfp4Weights,
    ScaleDtype,
    ShapeError,
)
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, join_scales
from epcomm.testing.data import ACTIVATIONS, BatchSpec, make_weights, random_ids
from epcomm.weights.quantized import QUANTIZED_KINDS, QuantizedWeights

# I = 144 and H = 200: blocks of 128 that are not full.
SPEC = BatchSpec(
    hidden_size=200,
    num_local_experts=3,
    tokens_of_rank=lambda rank, world_size: 1,
    choose_ids=random_ids,
)
every_kind = pytest.mark.parametrize("kind", QUANTIZED_KINDS.values(), ids=QUANTIZED_KINDS)


def plain() -> ExpertWeights:
    return make_weights(SPEC, 1, intermediate_size=144)


def lying_transposed(tensor: Tensor) -> Tensor:
    """Return the same elements, with the last two dimensions transposed in memory."""
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


Change = Callable[[Tensor], Tensor]
BAD: list[tuple[type[QuantizedWeights], str, Change, str]] = [
    (
        Fp8BlockWeights,
        "gate_up_proj",
        lambda codes: codes.view(torch.int8),
        "is torch.int8 [3, 288, 200], expected torch.float8_e4m3fn [3, 288, 200]",
    ),
    (
        Fp8BlockWeights,
        "down_scale",
        Tensor.bfloat16,
        "is torch.bfloat16 [3, 2, 2], expected torch.float32 [3, 2, 2]",
    ),
    # Powers of two next to float32.
    (
        Fp8BlockWeights,
        "down_scale",
        lambda scale: scale.to(torch.float8_e8m0fnu),
        "is torch.float8_e8m0fnu [3, 2, 2], expected torch.float32 [3, 2, 2] for gate_up_proj in "
        "torch.float8_e4m3fn and gate_up_scale in torch.float32",
    ),
    # A scale for each row of codes instead of each channel.
    (
        Int8ChannelWeights,
        "down_scale",
        lambda scale: scale[:, :144],
        "is torch.float32 [3, 144], expected torch.float32 [3, 200]",
    ),
    (
        Fp8BlockWeights,
        "gate_up_proj",
        lying_transposed,
        "is [3, 288, 200] with strides [57600, 1, 288], expected contiguous; call .contiguous()",
    ),
    (
        Int8ChannelWeights,
        "down_scale",
        lambda scale: scale.to("meta"),
        "is on meta, expected cpu as gate_up_proj; move it",
    ),
    (
        Int8ChannelWeights,
        "gate_up_proj",
        lambda codes: codes[0],
        "is [288, 200] and down_proj [3, 200, 144], expected",
    ),
    (
        Mxfp8Weights,
        "down_scale",
        lambda scale: scale.view(torch.uint8),
        "is torch.uint8 [3, 200, 5], expected torch.float8_e8m0fnu [3, 200, 5]",
    ),
    # Scales of blocks without the scale of the row, of which four bytes are padding and four it.
    (
        Nvfp4Weights,
        "gate_up_scale",
        lambda scale: scale[:, :, 4:17],
        "is torch.float8_e4m3fn [3, 288, 13], expected torch.float8_e4m3fn [3, 288, 20] for "
        "gate_up_proj in torch.uint8",
    ),
]


@pytest.mark.parametrize(("kind", "name", "change", "message"), BAD)
def test_tensor_that_does_not_fit_is_refused(
    kind: type[QuantizedWeights], name: str, change: Change, message: str
) -> None:
    weights = kind.from_unquantized(plain())
    tensors = weights.tensors()
    with pytest.raises(ShapeError, match=re.escape(f"{kind.__name__}: {name} {message}")):
        weights.with_tensors({**tensors, name: change(tensors[name])})


OTHERS = {"biases": make_weights(SPEC, 1, has_bias=True)} | {
    name: make_weights(SPEC, 1, expert_format=ACTIVATIONS[name])
    for name in ("clamped_swiglu", "limited_swiglu", "relu2")
}


@every_kind
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_experts_of_another_format_are_not_quantised(
    kind: type[QuantizedWeights], other: ExpertWeights
) -> None:
    with pytest.raises(ConfigError, match="leave such experts unquantised"):
        kind.from_unquantized(other)


@pytest.mark.parametrize("kind", [Mxfp4Weights, Nvfp4Weights])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 33), r"gate_up_proj is \[2, 64, 33\], expected rows of a multiple of 2 elements"),
        ((33, 32), r"down_proj is \[2, 32, 33\], expected rows of a multiple of 2 elements"),
    ],
)
def test_odd_matrix_of_four_bits_is_named(
    kind: type[QuantizedWeights], sizes: tuple[int, int], message: str
) -> None:
    inner, hidden = sizes
    odd = ExpertWeights(
        gate_up_proj=torch.ones(2, 2 * inner, hidden), down_proj=torch.ones(2, hidden, inner)
    )
    with pytest.raises(ShapeError, match=f"{kind.__name__}.from_unquantized: {message}"):
        kind.from_unquantized(odd)


@every_kind
def test_format_and_hidden_dtype_are_checked(kind: type[QuantizedWeights]) -> None:
    weights = kind.from_unquantized(plain())
    with pytest.raises(EPError):
        replace(weights, format=ExpertFormat(is_interleaved=True))
    with pytest.raises(EPError):
        replace(weights, hidden_dtype=torch.int8)


@every_kind
def test_zeros_stay_zeros(kind: type[QuantizedWeights]) -> None:
    weights = plain()
    zeros = replace(weights, gate_up_proj=torch.zeros_like(weights.gate_up_proj))
    quantized = kind.from_unquantized(zeros)
    found = quantized.dequantized()["gate_up_proj"]
    assert torch.equal(found, torch.zeros_like(found)), "a scale may be NaN"


@pytest.mark.parametrize("kind", [Fp8BlockWeights, Int8ChannelWeights, Nvfp4Weights])
def test_largest_element_keeps_its_value(kind: type[QuantizedWeights]) -> None:
    weights = plain()
    for name, values in kind.from_unquantized(weights).dequantized().items():
        original = getattr(weights, name).detach()
        largest = original.abs() == original.abs().amax(dim=(1, 2), keepdim=True)
        torch.testing.assert_close(values[largest], original[largest])


def test_power_of_two_scales_ask_for_such_rows() -> None:
    weights = Fp8BlockWeights.from_unquantized(plain(), scales="power_of_two")
    assert weights.gate_up_scale.dtype == weights.down_scale.dtype == torch.float8_e8m0fnu
    assert weights.wire_format == FP8_POWER_OF_TWO_SCALES
    # A checkpoint that keeps the same scales in float32.
    tensors = weights.tensors()
    kept = weights.with_tensors(
        {name: each.float() if name.endswith("scale") else each for name, each in tensors.items()}
    )
    assert kept.wire_format == FP8_FLOAT32_SCALES
    for name, values in kept.dequantized().items():
        assert torch.equal(values, weights.dequantized()[name])
    assert torch.equal(kept.gate_up_scale.to(torch.float8_e8m0fnu).float(), kept.gate_up_scale)


def test_nvfp4_takes_one_scale_for_a_matrix() -> None:
    """Join the scales of a checkpoint, H = 200, whose last block has 8 elements."""
    torch.manual_seed(0)
    codes = torch.randint(256, (3, 288, 100), dtype=torch.uint8)
    scales = (torch.rand(3, 288, 13) + 0.5).to(torch.float8_e4m3fn)
    of_matrix = torch.tensor([0.25, 3.0, 0.1])
    weights = Nvfp4Weights.from_unquantized(plain())
    joined = join_scales(scales, of_matrix.view(3, 1, 1))
    found = replace(weights, gate_up_proj=codes, gate_up_scale=joined).dequantized()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(2)
    numbers[8:] *= -1
    elements = numbers[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()]
    of_blocks = scales.float() * of_matrix.view(3, 1, 1)
    expected = elements * of_blocks.repeat_interleave(16, dim=2)[:, :, :200]
    assert torch.equal(found["gate_up_proj"], expected)
    with pytest.raises(ConfigError, match=r"float8_e4m3fn and torch\.float16, expected"):
        join_scales(scales, of_matrix.view(3, 1, 1).half())


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(448.0, 0), (449.0, 1), (224.0, -1), (225.0, 0), (1.0, -8), (0.875, -9), (2.0**-130, -126)],
)
def test_power_of_two_is_the_smallest_that_fits(largest: float, exponent: int) -> None:
    matrices = torch.zeros(1, 2, 3)
    matrices[0, 1, 2] = -largest
    codes, scales = Fp8BlockWeights._quantize(matrices, ScaleDtype.POWER_OF_TWO)
    assert scales.float().item() == 2.0**exponent
    assert codes.float().abs().max() <= 448
    assert torch.isfinite(codes.float()).all()


@pytest.mark.parametrize("kind", [Int8ChannelWeights, Mxfp8Weights, Nvfp4Weights])
def test_only_fp8_has_a_choice_of_scales(kind: type[QuantizedWeights]) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__}.* is power_of_two, which only Fp8"):
        kind.from_unquantized(plain(), scales=ScaleDtype.POWER_OF_TWO)


def test_elements_of_four_bits_come_in_pairs() -> None:
    weights = Nvfp4Weights.from_unquantized(plain())
    assert (weights.hidden_size, weights.intermediate_size) == (200, 144)
    with pytest.raises(ShapeError, match="and H a multiple of 2"):
        replace(weights, down_proj=weights.down_proj[:, :199])


@every_kind
def test_result_is_contiguous_whatever_was_quantised(kind: type[QuantizedWeights]) -> None:
    weights = plain()
    same = weights.with_tensors(
        {name: lying_transposed(tensor.detach()) for name, tensor in weights.tensors().items()}
    )
    assert not same.gate_up_proj.is_contiguous()
    expected = kind.from_unquantized(weights).tensors()
    for name, tensor in kind.from_unquantized(same).tensors().items():
        assert tensor.is_contiguous()
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))


@every_kind
@pytest.mark.parametrize(("hidden", "inner"), [(0, 128), (128, 0)])
def test_empty_experts_are_refused(kind: type[QuantizedWeights], hidden: int, inner: int) -> None:
    scale_shape = kind._scale_shape
    code = torch.int8 if kind is Int8ChannelWeights else torch.float8_e4m3fn
    with pytest.raises(ShapeError, match=r"expected \[E, H, I\] with H and I of at least 1"):
        kind(
            gate_up_proj=torch.empty(2, 2 * inner, hidden, dtype=code),
            gate_up_scale=torch.empty(scale_shape(2, 2 * inner, hidden)),
            down_proj=torch.empty(2, hidden, inner, dtype=code),
            down_scale=torch.empty(scale_shape(2, hidden, inner)),
        )


# The elements that share a scale with element (1, 130, 5).
SHARED: dict[str, tuple[type[QuantizedWeights], ScaleDtype, tuple[int | slice, ...]]] = {
    "fp8": (Fp8BlockWeights, ScaleDtype.FLOAT32, (1, slice(128, 256), slice(128))),
    "fp8 powers": (Fp8BlockWeights, ScaleDtype.POWER_OF_TWO, (1, slice(128, 256), slice(128))),
    "int8": (Int8ChannelWeights, ScaleDtype.FLOAT32, (1, 130)),
    "mxfp8": (Mxfp8Weights, ScaleDtype.FLOAT32, (1, 130, slice(32))),
    "nvfp4": (Nvfp4Weights, ScaleDtype.FLOAT32, (1, 130, slice(16))),
}


@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_value_that_is_not_finite_makes_all_of_its_scale_nan(value: float, case: str) -> None:
    (kind, scales, shared), weights = SHARED[case], plain()
    broken = weights.gate_up_proj.detach().clone()
    broken[1, 130, 5] = value
    quantized = kind.from_unquantized(replace(weights, gate_up_proj=broken), scales=scales)
    if kind is Int8ChannelWeights:
        assert not quantized.gate_up_proj[1, 130].any()
    found = quantized.dequantized()["gate_up_proj"]
    shares_a_scale = torch.zeros_like(found, dtype=torch.bool)
    shares_a_scale[shared] = True
    assert torch.equal(found.isnan(), shares_a_scale)
    expected = kind.from_unquantized(weights, scales=scales).dequantized()["gate_up_proj"]
    assert torch.equal(found[~shares_a_scale], expected[~shares_a_scale])


def test_scales_have_names() -> None:
    assert Int8ChannelWeights.from_unquantized(plain(), scales="float32").num_experts == 3
    with pytest.raises(ConfigError, match=r"scales is 'ue8m0', expected one of \['float32', 'pow"):
        Fp8BlockWeights.from_unquantized(plain(), scales="ue8m0")


@pytest.mark.parametrize("scales", [ScaleDtype.FLOAT32, ScaleDtype.POWER_OF_TWO])
def test_small_weights_keep_their_precision(scales: ScaleDtype) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(1, 128, 128) * 1e-9
    codes, found = Fp8BlockWeights._quantize(matrices, scales)
    back = codes.float() * found.float()
    # Half a step of e4m3 is 2**-4 of a normal element.
    assert (back - matrices).norm() <= 2**-4 * matrices.norm()
