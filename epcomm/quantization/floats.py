"""Quantise to floats of 8 and 4 bits with a scale for each block of a row, in plain torch.

With a the largest magnitude of a block and A that of its row, all steps in float32 and each rounded
to nearest even:

    float32 scales  scale = a * float32(1 / 448)               code = e4m3(x * (448 / a))
    powers of two   scale = smallest 2**e, a <= most * 2**e    code = e4m3 or e2m1(x / scale)
    nvfp4           row = A / 2688, scale = e4m3(a / 6 / row)  code = e2m1(x * (1 / row / scale))

fp8_e4m3 has the first or the second, mxfp8 and mxfp4 the second. `most` is the largest code: 448 of
e4m3, 6 of e2m1; 2688 is 6 * 448. Two codes of e2m1 are in a byte, the first in its low bits.

Sources. fp8_e4m3: the arithmetic that DeepEP's low-latency dispatch documents and shows. Scales
recorded from it settle what a description leaves open: its float32 scale is the product with the
rounded reciprocal of 448 and not the quotient a / 448 (18 / 448 differs), and a is at least 1e-4.
mxfp8, mxfp4: elements, blocks and scales are those of the OCP Microscaling Formats (MX) 1.0, and
the rule for scales is that of cuBLAS for MXFP8 (torchao: RCEIL). OCP describes another, the
largest power of two of a divided by that of `most`, which saturates elements above most * 2**e:
7.9 in fp4 becomes 6. If log2(a) has an even distribution, 19% of the blocks of mxfp8 and 42% of
those of mxfp4 have such an element, for which an error of half a step would not hold.
nvfp4: NVIDIA's two levels as in torchao, but with the largest magnitude of each row, so that a row
does not depend on others.

Not a number: a block with a NaN or an infinity has a NaN scale (0xFF as a power of two), which OCP
defines as a block of NaN; its codes are NaN too, or 0 of e2m1, which has none. It does not count in
A. OCP leaves this to the implementation.
Saturation: none of finite blocks, with these exceptions. |x * (448 / a)| exceeds 448 by rounding at
most, and rounds back to 448. The scale of nvfp4 is rounded to nearest, so a quotient may exceed 6
by a sixteenth, and becomes 6, as OCP clamps. What rounds to 2**128 is restored as an infinity.
Zeros: codes 0 and a positive scale: a is at least 1e-4 of fp8_e4m3, 2**-127 is the least power of
two, the scale of a block of nvfp4 is at least 2**-6, the least normal e4m3 number, and A is at
least 2688 * 2**-120, above which 1 / row / scale cannot overflow. Elements far below a floor round
to zero.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.types import ROW_SCALE_BYTES, WireDtype, WireFormat, WireTensor

# The formats that GEMMs of FP8 weights read: blocks of 128 elements.
FP8_FLOAT32_SCALES = WireFormat(dtype=WireDtype.FP8_E4M3)
FP8_POWER_OF_TWO_SCALES = WireFormat(dtype=WireDtype.FP8_E4M3, scale_dtype=torch.float8_e8m0fnu)

# The largest finite numbers of e4m3, 1.75 * 2**8, and of e2m1, 1.5 * 2**2, and their float32 bits.
E4M3_MAX, E4M3_MAX_BITS = 448.0, 0x43E00000
E2M1_MAX, E2M1_MAX_BITS = 6.0, 0x40C00000
# float32(1 / 448): the product with the float64 1 / 448 would differ.
_RECIPROCAL_OF_MAX = 0.0022321429569274187
# An fp8_e4m3 block whose largest magnitude is below this is quantised as if it were this.
AMAX_FLOOR = 1e-4
# The same for a row of nvfp4, and for the scale of one of its blocks.
ROW_AMAX_FLOOR, E4M3_NORMAL = E4M3_MAX * E2M1_MAX * 2.0**-120, 2.0**-6
# All fraction bits of float32: any of them in a quotient of powers needs the next power.
_FRACTION_MASK = 0x7FFFFF
_NAN = float("nan")
# e8m0 has one NaN, and 2**e is stored as e + 127.
_E8M0_NAN = 0xFF


def write_floats(hidden_states: Tensor, wire: WireTensor) -> None:
    """Write codes and scales of hidden states, with the arithmetic of the module docstring.

    Args:
        hidden_states: [..., T, H], bfloat16, float16 or float32, any strides.
        wire: written; a format of floats, with rows of any stride. A block of 0 means all of H.
    """
    wire_format, kind = wire.format, wire.format.dtype
    blocks = _in_blocks(hidden_states.float(), wire_format)
    amax = blocks.abs().amax(dim=-1)
    is_finite = amax.isfinite()
    amax = amax.masked_fill(~is_finite, 0.0)
    if kind is WireDtype.FP8_E4M3:
        amax = amax.clamp(min=AMAX_FLOOR)
    row_scales, block_scales = split_scales(wire)
    if wire_format.has_exponents:
        exponents, factors = _power_of_two_scales(
            amax, E2M1_MAX_BITS if kind.per_item > 1 else E4M3_MAX_BITS
        )
        block_scales.view(torch.uint8).copy_(exponents.masked_fill(~is_finite, _E8M0_NAN))
    else:
        if row_scales is None:
            factors, scales = divide(E4M3_MAX, amax), amax * _RECIPROCAL_OF_MAX
        else:
            assert wire.scales is not None, "split above"
            wire.scales.view(torch.uint8).zero_()
            scales, factors = _write_row_scales(amax, row_scales)
        block_scales.copy_(scales.masked_fill(~is_finite, _NAN))
    scaled = blocks * factors.unsqueeze(-1)
    scaled.masked_fill_(~is_finite.unsqueeze(-1), 0.0 if kind.per_item > 1 else _NAN)
    scaled = scaled.flatten(-2)[..., : hidden_states.shape[-1]]
    if kind.per_item > 1:
        wire.data.view(torch.uint8).copy_(_pack_e2m1(scaled))
    else:
        wire.data.copy_(scaled)


def restore(wire: WireTensor, dtype: torch.dtype) -> Tensor:
    """Multiply the codes of any quantised format by their scales in float32: [..., R, H] in dtype.

    Of two levels of scales, the product of both is rounded before it multiplies a code. The scales
    have the shape of row-major scales and any strides; packed scales are unpacked first.
    """
    row_scales, block_scales = split_scales(wire)
    scales = block_scales.float()
    if row_scales is not None:
        scales = scales * row_scales
    elements = _in_blocks(_numbers_of(wire), wire.format).mul_(scales.unsqueeze(-1))
    return elements.flatten(-2)[..., : wire.hidden_size].to(dtype)


def split_scales(wire: WireTensor) -> tuple[Tensor | None, Tensor]:
    """Return views of the scales of rows and of their blocks, which are row-major.

    Returns:
        The scales of rows, [..., R, 1], float32, or None without WireDtype.has_row_scale; and
        those of blocks, [..., R, num_blocks], format.scale_dtype.
    """
    scales, wire_format = wire.scales, wire.format
    assert scales is not None, "quantised formats have scales"
    if not wire_format.dtype.has_row_scale:
        return None, scales
    end = ROW_SCALE_BYTES + wire_format.num_blocks(wire.hidden_size)
    of_rows = scales.view(torch.uint8)[..., :ROW_SCALE_BYTES].view(torch.float32)
    return of_rows, scales[..., ROW_SCALE_BYTES:end]


def join_scales(block_scales: Tensor, row_scales: Tensor) -> Tensor:
    """Return the scales of rows in nvfp4 from both levels, the inverse of split_scales().

    block_scales: [..., R, num_blocks], float8_e4m3fn.   row_scales: float32, broadcast to
        [..., R, 1], such as one scale for a matrix.

    Raises:
        ConfigError: other dtypes.
    """
    dtypes = (block_scales.dtype, row_scales.dtype)
    if dtypes != (torch.float8_e4m3fn, torch.float32):
        raise ConfigError(
            f"join_scales: scales are {dtypes[0]} and {dtypes[1]}, expected torch.float8_e4m3fn "
            "of blocks and torch.float32 of rows; view or cast them"
        )
    of_rows = row_scales.expand(*block_scales.shape[:-1], 1).contiguous()
    joined = torch.cat([of_rows.view(torch.uint8), block_scales.view(torch.uint8)], dim=-1)
    return F.pad(joined, (0, -joined.shape[-1] % ROW_SCALE_BYTES)).view(block_scales.dtype)


def _in_blocks(elements: Tensor, wire_format: WireFormat) -> Tensor:
    """View [..., H] as blocks [..., S, block], with the last block padded with zeros."""
    hidden_size = elements.shape[-1]
    block = wire_format.scale_block or hidden_size
    padding = -hidden_size % block
    # F.pad copies even where it adds nothing.
    return (F.pad(elements, (0, padding)) if padding else elements).unflatten(-1, (-1, block))


def power_of_two_exponents(amax: Tensor, most_bits: int = E4M3_MAX_BITS) -> Tensor:
    """Return the biased exponents of the smallest powers with amax <= most * power, int32.

    amax: float32, finite.   most_bits: the bits of `most`, which have the order of the numbers.
    """
    return (((amax.view(torch.int32) - most_bits + _FRACTION_MASK) >> 23) + 127).clamp(min=0)


def _power_of_two_scales(amax: Tensor, most_bits: int) -> tuple[Tensor, Tensor]:
    """Return the biased exponents of the scales, uint8, and the factors of the elements."""
    exponents = power_of_two_exponents(amax, most_bits)
    # No finite block exceeds 253, so the inverse is normal too.
    return exponents.to(torch.uint8), ((254 - exponents) << 23).view(torch.float32)


def _write_row_scales(amax: Tensor, row_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Write the scales of rows; return those of blocks and the factors of the elements."""
    row_amax = amax.amax(dim=-1, keepdim=True).clamp(min=ROW_AMAX_FLOOR)
    of_row = torch.div(row_amax, torch.full_like(row_amax, E4M3_MAX * E2M1_MAX))
    row_scales.copy_(of_row)
    scales = torch.div(amax, torch.full_like(amax, E2M1_MAX)) / of_row
    scales = scales.clamp(E4M3_NORMAL, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return scales, divide(1.0, of_row) / scales


def divide(numerator: float, tensor: Tensor) -> Tensor:
    """Return the rounded quotients; `number / tensor` would be a product with a reciprocal."""
    return torch.div(torch.full_like(tensor, numerator), tensor)


def _pack_e2m1(elements: Tensor) -> Tensor:
    """Return the nearest e2m1 codes of [..., H], ties to even, in bytes [..., H / 2].

    Codes are 0 to 7 for 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Each of three roundings is right where the
    steps are 0.5, 1 and 2, and too large elsewhere.
    """
    # In place: new memory would take longer than the arithmetic.
    magnitude = elements.abs().clamp_(max=E2M1_MAX)
    codes = (magnitude * 2).round_()
    torch.minimum(codes, magnitude.round().add_(2), out=codes)
    torch.minimum(codes, magnitude.mul_(0.5).round_().add_(4), out=codes)
    codes = codes.to(torch.uint8)
    codes |= elements.signbit().to(torch.uint8) << 3
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def _numbers_of(wire: WireTensor) -> Tensor:
    """Return the numbers of codes in new memory: [..., H], float32.

    On a CPU to look a byte up is five times as fast as to convert a float of 8 bits.
    """
    data, kind = wire.data, wire.format.dtype
    if kind is WireDtype.INT8:
        return data.float()
    items = torch.arange(256, dtype=torch.uint8, device=data.device)
    table = _unpack_e2m1(items) if kind.per_item > 1 else items.view(kind.torch_dtype).float()
    if kind.per_item > 1:
        # Two numbers as one, because rows of a table are copied one by one.
        table = table.view(torch.int64)
    found = table.index_select(0, data.view(torch.uint8).flatten().int())
    return found.view(torch.float32).view(*data.shape[:-1], wire.hidden_size)


def _unpack_e2m1(data: Tensor) -> Tensor:
    """Return the numbers of e2m1 codes in bytes [..., H / 2]: [..., H], float32."""
    packed = data.view(torch.uint8)
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).to(torch.int16)
    # Three bits at the end of the exponent of a float16, below its fraction, are 2**-14 as large.
    magnitude = ((codes & 7) << 9).view(torch.float16).float() * 2.0**14
    return torch.where(codes > 7, -magnitude, magnitude)
