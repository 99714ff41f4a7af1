"""The checkpoint of the golden file, by its formulas, and digests of tensors."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epcomm import Int8ChannelWeights

HIDDEN, INTERMEDIATE = 64, 192
GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "contracts" / "ascend_fuseep_weights.json").read_text("utf-8")
)


def golden_weights(num_experts: int) -> Int8ChannelWeights:
    """Make the golden experts: gate_up_proj [L, 384, 64], down_proj [L, 64, 192]."""
    expert = torch.arange(num_experts)[:, None, None]
    hidden, inner = torch.arange(HIDDEN), torch.arange(INTERMEDIATE)
    column = torch.arange(2 * INTERMEDIATE)
    i, h = column[:, None], hidden[None, :]
    gate_up = (7 * i + 13 * h + 29 * expert + (i * h) % 23) % 255 - 127
    h, i = hidden[:, None], inner[None, :]
    down = (11 * h + 5 * i + 17 * expert + (i * h) % 19) % 255 - 127
    expert = expert[:, :, 0]
    gate_up_scale = 1000003 + 7919 * ((5 * column + 11 * expert) % 97)
    down_scale = 900007 + 6007 * ((3 * hidden + 17 * expert) % 89)
    return Int8ChannelWeights(
        gate_up_proj=gate_up.to(torch.int8),
        gate_up_scale=(gate_up_scale.double() * 2.0**-28).float(),
        down_proj=down.to(torch.int8),
        down_scale=(down_scale.double() * 2.0**-28).float(),
    )


def assert_golden(found: Tensor, golden: dict[str, Any]) -> None:
    """Compare dtype, shape and every byte, little-endian in row-major order."""
    assert str(found.dtype) == f"torch.{golden['dtype']}"
    assert list(found.shape) == golden["shape"]
    assert digest(found) == golden["sha256"]


def digest(tensor: Tensor) -> str:
    """Return the sha256 of the bytes, row-major."""
    data = tensor.contiguous().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
