import math

from examples.path_report import PathRecord, choices


def record(*, to_w8a8: float = 0.018, to_reference: float | None = 0.003) -> PathRecord:
    return PathRecord(
        name="normal",
        to_bf16=0.5,
        to_w8a8=to_w8a8,
        to_reference=to_reference,
        sent=[],
        host_syncs=1,
        choice="mode normal",
    )


def failure(of: PathRecord) -> str | None:
    return of.failure(max_error=0.02, max_difference=0.01)


def test_errors_up_to_the_limits_pass() -> None:
    assert failure(record(to_w8a8=0.02, to_reference=0.01)) is None
    assert failure(record(to_reference=None)) is None


def test_both_errors_beyond_the_limits_are_named() -> None:
    assert failure(record(to_w8a8=0.021, to_reference=0.012)) == (
        "normal differs from the layer in float64 with these W8A8 weights by 2.10e-02, expected at "
        "most 2.00e-02; normal differs from the FuseEP reference by 1.20e-02, expected at most "
        "1.00e-02"
    )


def test_nan_fails() -> None:
    found = failure(record(to_w8a8=math.nan))
    assert found is not None
    assert "by nan" in found


def test_choices_are_aligned() -> None:
    assert choices([record()]) == "normal  mode normal"
