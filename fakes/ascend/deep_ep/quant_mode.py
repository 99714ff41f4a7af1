"""Name the formats of rows, and check which of them a chip has."""

from fakes.ascend.limits import Soc, require, require_modelled, require_soc

BF16 = "bf16"
INT8 = "int8"
# Formats of Ascend 950 only.
A5_MODES = ("mx_fp8_e4m3", "mx_fp8_e5m2", "pertoken_fp8_e4m3", "mx_fp4_e2m1")


def checked(operator: str, mode: str) -> str:
    """Return the mode, which the chip and the imitation must have."""
    known = (BF16, INT8, *A5_MODES)
    require(operator, mode in known, f"quant_mode is {mode!r}, expected one of {known}")
    if mode in A5_MODES:
        require_soc(operator, f"quant_mode={mode!r}", Soc.A5)
    require_modelled(operator, mode not in A5_MODES, f"quant_mode={mode!r}")
    return mode


def low_latency_mode(
    quant_mode: str | None, *, use_fp8: bool, use_ue8m0: bool, use_mxfp4: bool
) -> str:
    """Return the mode that the flags of low_latency_dispatch() mean; use_fp8 means INT8."""
    if quant_mode is not None:
        return quant_mode
    if use_mxfp4:
        return "mx_fp4_e2m1"
    if use_fp8 and use_ue8m0:
        return "mx_fp8_e4m3"
    return INT8 if use_fp8 else BF16
