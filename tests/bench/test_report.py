"""Tables keep every digit in a terminal of 80 columns, which is also what a log file has."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

from epcomm.bench.contenders.sent_bytes import SentBytes
from epcomm.bench.records import Timing
from epcomm.bench.report import layers_table, timings_table
from epcomm.bench.timing import Percentiles

# Two seconds, and more than a gigabyte: longer than any run should take.
LONG = Percentiles(p50=1_234_567.0, p95=2_345_678.0, p99=3_456_789.0)
SENT = SentBytes(dispatch=1_000_000_000, combine=234_567_000, control=1000)


def printed(table: Table) -> str:
    file = StringIO()
    Console(file=file, width=80).print(table)
    return file.getvalue()


def test_numbers_are_whole() -> None:
    pair = Timing(
        mode="low_latency",
        backend="shared_memory",
        tokens=8192,
        in_graph=True,
        us={"dispatch": LONG, "combine": LONG, "pair": LONG},
        sent_bytes=SENT,
    )
    words = printed(timings_table([pair])).split()
    numbers = ["1234567", "1234567", "1234567", "2345678", "3456789", "1234.57"]
    assert [word for word in words if word in numbers] == numbers
    layer = Timing(
        mode="low_latency",
        backend="shared_memory",
        runner="quantized_reference",
        tokens=8192,
        in_graph=True,
        us={"layer": LONG},
    )
    assert {"1234567", "2345678", "3456789"} <= set(printed(layers_table([layer])).split())
