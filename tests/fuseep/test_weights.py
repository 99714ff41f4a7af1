"""Packed experts: golden layouts, bit-equality, and refused weights."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epcomm import (
    ConfigError,
    ExpertWeights,
    Fp8BlockWeights,
    Int8ChannelWeights,
    ShapeError,
)
from epcomm.fuseep.interleave import permutation
from epcomm.fuseep.weights import DispatchFFNCombineWeights, FusedDeepMoEWeights
from epcomm.platforms.ascend import formats as nz
from epcomm.platforms.ascend.chip import Soc
from epcomm.platforms.ascend.formats import ACL_FORMAT_ND, ACL_FORMAT_NZ
from fakes.ascend.formats import as_nd, format_of, nz_pack
from tests.cases.fuseep_checkpoint import (
    GOLDEN,
    HIDDEN,
    INTERMEDIATE,
    assert_golden,
    golden_weights,
)

Packed = FusedDeepMoEWeights | DispatchFFNCombineWeights
MODES = {"mode_1": FusedDeepMoEWeights, "mode_2": DispatchFFNCombineWeights}
KINDS = tuple(MODES.values())
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
quick = settings(max_examples=25, deadline=None, derandomize=True)
# The golden file's names of the fields.
GOLDEN_NAMES = {
    "w13": "gate_up_proj",
    "s13": "gate_up_scale",
    "w2": "down_proj",
    "s2": "down_scale",
}


def values(tensor: Tensor) -> Tensor:
    """Return values in row-major order, by the imitation's own reading of NZ."""
    return as_nd("the test", tensor)


def random_weights(num_experts: int, hidden: int, inner: int, seed: int = 0) -> Int8ChannelWeights:
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)

    def scales(*shape: int) -> Tensor:
        # Any bits: subnormal, negative and NaN among them.
        bits = torch.randint(-(2**31), 2**31, shape, generator=generator)
        return bits.to(torch.int32).view(torch.float32)

    return Int8ChannelWeights(
        gate_up_proj=codes(num_experts, 2 * inner, hidden),
        gate_up_scale=scales(num_experts, 2 * inner),
        down_proj=codes(num_experts, hidden, inner),
        down_scale=scales(num_experts, hidden),
    )


def bytes_of(weights: Int8ChannelWeights | Packed) -> list[Tensor]:
    """Every tensor, byte by byte; NaN equals itself there."""
    tensors = [getattr(weights, name) for name in GOLDEN_NAMES.values()]
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in tensors]


def assert_same_bytes(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", GOLDEN["packing"], ids=lambda case: f"L{case['L']}")
def test_packed_weights_are_the_golden_ones(case: dict) -> None:
    weights = golden_weights(case["L"])
    checkpoint = case["checkpoint"]
    assert_golden(weights.gate_up_proj, checkpoint["w13"])
    assert_golden(weights.gate_up_scale.unsqueeze(2), checkpoint["s13"])
    assert_golden(weights.down_proj, checkpoint["w2"])
    assert_golden(weights.down_scale.unsqueeze(2), checkpoint["s2"])
    for mode, kind in MODES.items():
        packed = kind.pack(weights)
        for name, field in GOLDEN_NAMES.items():
            assert_golden(values(getattr(packed, field)), case[mode][name])
        for name in ("w13", "w2"):
            matrices = values(getattr(packed, GOLDEN_NAMES[name]))
            assert_golden(nz_pack(matrices), case[mode][f"{name}_nz_storage"])


def test_dtypes_shapes_and_formats_are_those_of_each_mode() -> None:
    experts, hidden, inner = 3, 96, 192
    weights = random_weights(experts, hidden, inner)
    table = {
        FusedDeepMoEWeights: {
            "gate_up_proj": (torch.int8, (experts, hidden, 2 * inner), ACL_FORMAT_NZ),
            "gate_up_scale": (torch.float32, (experts, 2 * inner), ACL_FORMAT_ND),
            "down_proj": (torch.int8, (experts, hidden, inner), ACL_FORMAT_NZ),
            "down_scale": (torch.float32, (experts, hidden), ACL_FORMAT_ND),
        },
        DispatchFFNCombineWeights: {
            "gate_up_proj": (torch.int8, (experts, hidden, 2 * inner), ACL_FORMAT_NZ),
            "gate_up_scale": (torch.int64, (experts * 2 * inner,), ACL_FORMAT_ND),
            "down_proj": (torch.int8, (experts, inner, hidden), ACL_FORMAT_NZ),
            "down_scale": (torch.int64, (experts * hidden,), ACL_FORMAT_ND),
        },
    }
    for kind, row in table.items():
        packed = kind.pack(weights)
        found = {field.name: getattr(packed, field.name) for field in fields(packed)}
        assert {
            name: (tensor.dtype, tuple(tensor.shape), format_of(tensor))
            for name, tensor in found.items()
        } == row
        assert all(tensor.is_contiguous() for tensor in found.values())
        sizes = (packed.num_experts, packed.hidden_size, packed.intermediate_size)
        assert sizes == (experts, hidden, inner)
        assert packed.soc is Soc.A3


@quick
@given(
    kind=st.sampled_from(KINDS),
    experts=st.integers(1, 3),
    # Not all of them are whole tiles; 1 and 64 make transposes and tiles trivial.
    hidden=st.sampled_from([1, 16, 32, 50]),
    inner=st.sampled_from([64, 128, 192]),
    seed=st.integers(0, 5),
)
def test_packing_keeps_every_bit(
    kind: type[Packed], experts: int, hidden: int, inner: int, seed: int
) -> None:
    weights = random_weights(experts, hidden, inner, seed)
    before = bytes_of(weights)
    packed = kind.pack(weights)
    gate_up, down = values(packed.gate_up_proj).transpose(1, 2), values(packed.down_proj)
    if kind is FusedDeepMoEWeights:
        order = permutation(2 * inner).argsort()
        gate_up, gate_up_scale = gate_up[:, order], packed.gate_up_scale[:, order]
        down_scale = packed.down_scale
    else:
        down = down.transpose(1, 2)
        gate_up_scale, down_scale = (
            bits.to(torch.int32).view(torch.float32).view(experts, -1)
            for bits in (packed.gate_up_scale, packed.down_scale)
        )
    for tensor, expected in zip((gate_up, gate_up_scale, down, down_scale), before, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.uint8), expected)
    assert_same_bytes(bytes_of(weights), before)
    num_bytes = sum(each.numel() for each in bytes_of(packed))
    assert kind.num_bytes(experts, hidden, inner) == num_bytes


@every_kind
def test_other_experts_are_refused_by_python_and_by_types(kind: type[Packed]) -> None:
    weights = golden_weights(1)
    plain = ExpertWeights(
        gate_up_proj=torch.zeros(1, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16),
        down_proj=torch.zeros(1, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16),
    )
    fp8 = Fp8BlockWeights.from_unquantized(plain)
    advice = "expected Int8ChannelWeights; pack the W8A8 experts of a checkpoint, once"
    with pytest.raises(ConfigError, match=f"ExpertWeights, {advice}"):
        kind.pack(plain)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=f"Fp8BlockWeights, {advice}"):
        kind.pack(fp8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=f"FusedDeepMoEWeights, {advice}"):
        kind.pack(FusedDeepMoEWeights.pack(weights))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=f"DispatchFFNCombineWeights, {advice}"):
        kind.pack(DispatchFFNCombineWeights.pack(weights))  # pyright: ignore[reportArgumentType]
    half = replace(weights, hidden_dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"hidden_dtype is torch.float16, expected torch.bfloat"):
        kind.pack(half)


def test_no_mode_takes_the_other_one() -> None:
    def of_mode_1(weights: FusedDeepMoEWeights) -> FusedDeepMoEWeights:
        return weights

    def of_mode_2(weights: DispatchFFNCombineWeights) -> DispatchFFNCombineWeights:
        return weights

    first = FusedDeepMoEWeights.pack(golden_weights(1))
    second = DispatchFFNCombineWeights.pack(golden_weights(1))
    assert not isinstance(of_mode_1(second), FusedDeepMoEWeights)  # pyright: ignore[reportArgumentType]
    assert not isinstance(of_mode_2(first), DispatchFFNCombineWeights)  # pyright: ignore[reportArgumentType]
    for packed in (first, second):
        with pytest.raises(FrozenInstanceError):
            packed.down_proj = packed.gate_up_proj  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, kw_only=True)
class Bad:
    id: str
    kind: type[Packed]
    name: str
    change: Callable[[Tensor], Tensor]
    message: str


BAD = [
    Bad(
        id="two dimensions",
        kind=FusedDeepMoEWeights,
        name="gate_up_proj",
        change=lambda codes: codes[0],
        message=r"is \[64, 384\], expected \[E, H, 2I\] with 2I a multiple of 128",
    ),
    Bad(
        id="half a tile",
        kind=FusedDeepMoEWeights,
        name="gate_up_proj",
        change=lambda codes: codes[:, :, :320].contiguous(),
        message=r"is \[1, 64, 320\], expected \[E, H, 2I\] with 2I a multiple of 128",
    ),
    Bad(
        id="codes of another dtype",
        kind=DispatchFFNCombineWeights,
        name="gate_up_proj",
        change=lambda codes: codes.view(torch.uint8),
        message=r"is torch.uint8 \[1, 64, 384\] .* expected torch.int8 \[1, 64, 384\]",
    ),
    Bad(
        id="scales of mode 1 in mode 2",
        kind=DispatchFFNCombineWeights,
        name="down_scale",
        change=lambda scale: scale.float().view(1, -1),
        message=r"is torch.float32 \[1, 64\] .* expected torch.int64 \[64\]",
    ),
    Bad(
        id="lying otherwise",
        kind=FusedDeepMoEWeights,
        name="down_proj",
        change=lambda codes: codes.transpose(1, 2).contiguous().transpose(1, 2),
        message=r"with strides \[12288, 1, 64\] on cpu, expected .* contiguous on cpu; make the "
        r"record by pack\(\)",
    ),
    Bad(
        id="on another device",
        kind=FusedDeepMoEWeights,
        name="down_scale",
        change=lambda scale: scale.to("meta"),
        message=r"is .* on meta, expected .* on cpu",
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_records_that_do_not_fit_are_refused(bad: Bad) -> None:
    packed = bad.kind.pack(golden_weights(1))
    tensor = bad.change(getattr(packed, bad.name))
    with pytest.raises(ShapeError, match=f"^{bad.kind.__name__}: {bad.name} .*?{bad.message}"):
        replace(packed, **{bad.name: tensor})


def test_where_nothing_casts_matrices_stay_row_major(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nz, "has_kernel", lambda name, device: False)
    golden = GOLDEN["packing"][1]
    weights = golden_weights(golden["L"])
    for mode, kind in MODES.items():
        packed = kind.pack(weights)
        assert_golden(packed.gate_up_proj, golden[mode]["w13"])
        assert_golden(packed.down_proj, golden[mode]["w2"])
        # The record does not share memory with the checkpoint.
        before = bytes_of(packed)
        weights.down_proj.copy_(-weights.down_proj)
        assert_same_bytes(bytes_of(packed), before)
        weights.down_proj.copy_(-weights.down_proj)
