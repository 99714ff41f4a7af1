import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epcomm import Int8ChannelWeights
from epcomm.fuseep.weights import (
    DispatchFFNCombineWeights,
    FusedDeepMoEWeights,
    bits_of_scales,
    interleave,
)
from epcomm.platforms.ascend import formats as nz
from fakes.ascend.formats import as_nd, nz_pack
from tests.cases.fuseep_checkpoint import GOLDEN, assert_golden, digest, golden_weights

Packed = FusedDeepMoEWeights | DispatchFFNCombineWeights
MODES = {"mode_1": FusedDeepMoEWeights, "mode_2": DispatchFFNCombineWeights}
KINDS = tuple(MODES.values())
quick = settings(max_examples=25, deadline=None, derandomize=True)
# The golden file's names of the fields.
FIELDS = {"w13": "gate_up_proj", "s13": "gate_up_scale", "w2": "down_proj", "s2": "down_scale"}


def permutation(num_columns: int) -> Tensor:
    """Return the column in the checkpoint of each interleaved column."""
    return interleave(torch.arange(num_columns), dim=0)


def values(tensor: Tensor) -> Tensor:
    """Return values in row-major order, by the imitation's own reading of NZ."""
    return as_nd("the test", tensor)


def random_weights(num_experts: int, hidden: int, inner: int, seed: int = 0) -> Int8ChannelWeights:
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)

    def scales(*shape: int) -> Tensor:
        # Any bits, including subnormal numbers, negative numbers and NaN.
        bits = torch.randint(-(2**31), 2**31, shape, generator=generator)
        return bits.to(torch.int32).view(torch.float32)

    return Int8ChannelWeights(
        gate_up_proj=codes(num_experts, 2 * inner, hidden),
        gate_up_scale=scales(num_experts, 2 * inner),
        down_proj=codes(num_experts, hidden, inner),
        down_scale=scales(num_experts, hidden),
    )


def bytes_of(weights: Int8ChannelWeights | Packed) -> list[Tensor]:
    """Return every tensor as bytes, so that NaN equals itself."""
    tensors = [getattr(weights, name) for name in FIELDS.values()]
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
        for name, field in FIELDS.items():
            assert_golden(values(getattr(packed, field)), case[mode][name])
        for name in ("w13", "w2"):
            matrices = values(getattr(packed, FIELDS[name]))
            assert_golden(nz_pack(matrices), case[mode][f"{name}_nz_storage"])


@quick
@given(
    kind=st.sampled_from(KINDS),
    experts=st.integers(1, 3),
    # Not all sizes are whole tiles; 1 and 64 make transposes and tiles trivial.
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


@pytest.mark.parametrize("case", GOLDEN["int64_scale"], ids=lambda case: case["float32_bits"])
def test_bits_are_the_golden_ones(case: dict[str, Any]) -> None:
    scale = struct.unpack(">f", bytes.fromhex(case["float32_bits"]))[0]
    bits = bits_of_scales(torch.tensor([scale]))
    assert bits.dtype == torch.int64
    assert bits.tolist() == [case["int64"]]


def test_the_permutation_is_the_golden_one() -> None:
    golden = GOLDEN["permutation"]
    assert permutation(golden["2I"]).tolist() == golden["perm"]
    inverse = permutation(golden["2I"]).argsort()
    assert digest(inverse) == golden["sha256_of_inverse_as_int64"]
    found = {size: digest(permutation(int(size))) for size in golden["sha256_of_perm_as_int64"]}
    assert found == golden["sha256_of_perm_as_int64"]
