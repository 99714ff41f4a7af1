"""Selection by device type: plain torch unless a backend has kernels; triton only when asked."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from epcomm import BackendUnavailable
from epcomm.quantization import quantize, quantizer_for


def test_devices_without_kernels_take_plain_torch() -> None:
    assert quantizer_for(torch.device("cpu")) is quantize
    assert quantizer_for(torch.device("meta")) is quantize


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ("kernels.launch", "kernels.quantize.fp8", "kernels.quantize.int8")
    for name in ("quantization.with_triton", *kernels):
        monkeypatch.delitem(sys.modules, f"epcomm.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(BackendUnavailable, match=r"triton is not installed.*cuda"):
        quantizer_for(torch.device("cuda"))


def test_import_does_not_load_triton() -> None:
    code = "import sys, epcomm.quantization, epcomm.kernels; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
