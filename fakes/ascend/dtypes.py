"""Map the numbers that operators take for dtypes to dtypes.

A torch.dtype that is passed for an `int?` parameter reaches the operator as PyTorch's own number of
that scalar type.
"""

from types import MappingProxyType

import torch

# c10::ScalarType; torch has no such table in Python.
DTYPES = MappingProxyType(
    {
        0: torch.uint8,
        1: torch.int8,
        2: torch.int16,
        3: torch.int32,
        4: torch.int64,
        5: torch.float16,
        6: torch.float32,
        7: torch.float64,
        11: torch.bool,
        15: torch.bfloat16,
        23: torch.float8_e5m2,
        24: torch.float8_e4m3fn,
        44: torch.float8_e8m0fnu,
    }
)


def dtype_of(operator: str, number: int) -> torch.dtype:
    """Return the dtype with this number; the vendor has further ones, which are refused."""
    if number not in DTYPES:
        raise RuntimeError(
            f"{operator} (stand-in of torch_npu): dtype number is {number}, expected one of "
            f"{', '.join(f'{known} ({dtype})' for known, dtype in DTYPES.items())}"
        )
    return DTYPES[number]
