import pytest
import torch
from torch import Tensor

from benchmarks import bench_rows
from benchmarks.bench_rows import QUANTIZATIONS, Sizes, cases_of, line_of, measure, quantize_case
from epcomm import WireFormat, WireTensor
from epcomm.ops import slots as kernels_by_device
from epcomm.quantization import Int8Profile, quantize

pytest.importorskip("triton")

SIZES = Sizes(tokens=12, hidden=72, inner=48, top_k=3, experts=8, ranks=2)


def test_every_case_passes_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels_by_device._LOADERS, "cpu", kernels_by_device._LOADERS["cuda"])
    names = []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for make in cases_of(SIZES, device):
        case = make()
        case.check()
        case.call()
        names.append(case.name)
    assert names[:3] == ["pack bf16", "pack fp8_e4m3", "inverse of pack"]
    assert len(names) == len(set(names)) == 7 + 2 * len(QUANTIZATIONS) + 2 * 6


def test_one_wrong_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(
        hidden_states: Tensor,
        wire_format: WireFormat,
        *,
        profile: Int8Profile = Int8Profile.RINT127,
        out: WireTensor | None = None,
    ) -> WireTensor:
        wire = quantize(hidden_states, wire_format, profile=profile, out=out)
        wire.data[3, 5] += 1
        return wire

    monkeypatch.setattr(bench_rows, "quantizer_for", lambda device: wrong)
    case = quantize_case("int8 rint127", torch.randn(6, 300).bfloat16())
    finding = measure(lambda: case, torch.device("cpu"), 1)
    assert finding.ms is None
    assert finding.fault.startswith("int8 rint127: 1 elements differ from plain torch")
    assert line_of(finding).startswith(f"quantise int8 rint127 300: {finding.fault}")
