"""Write the results of benchmarks into a Markdown file, between markers; nobody types a number.

    python -m benchmarks.readme_table README.md

replaces what stands between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->` by a table made
from benchmarks/results/NAME.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, TypedDict

import typer

RESULTS = Path(__file__).parent / "results"

_MARKED = re.compile(
    r"(?P<start><!-- benchmark:(?P<name>[\w-]+) -->\n).*?(?P<end><!-- /benchmark -->)", re.DOTALL
)
_QUANTILES = ("p50", "p95", "p99")


class ContenderResult(TypedDict):
    """Of one contender, as report.py writes it."""

    ms: dict[str, dict[str, float]]
    sent_bytes: dict[str, int]


class Result(TypedDict):
    """The parts of a result that a table shows."""

    configuration: dict[str, str | int | bool]
    hardware: dict[str, str | int]
    versions: dict[str, str]
    command: str
    contenders: dict[str, ContenderResult]
    ratio_of_medians: dict[str, float]


def fill(text: str, results: Path = RESULTS) -> str:
    """`text` with a fresh table between each pair of markers.

    Raises:
        FileNotFoundError: a marker names a result that is not there.
    """

    def table(match: re.Match[str]) -> str:
        path = results / f"{match['name']}.json"
        return f"{match['start']}{render(json.loads(path.read_text('utf-8')))}{match['end']}"

    return _MARKED.sub(table, text)


def render(result: Result) -> str:
    """The table of one result, and under it what was measured where."""
    contenders = result["contenders"]
    heads = [f"{name} {quantile}" for name in contenders for quantile in _QUANTILES]
    lines = [
        _row("ms on the slowest rank", *heads, "times as fast"),
        _row("---", *["---:"] * (len(heads) + 1)),
    ]
    for span, ratio in result["ratio_of_medians"].items():
        cells = [
            f"{contender['ms'][span][quantile]:.1f}"
            for contender in contenders.values()
            for quantile in _QUANTILES
        ]
        lines.append(_row(span.replace("_", " "), *cells, f"{ratio:.2f}"))
    sent = [f"{one['sent_bytes']['total'] / 1e6:.2f} MB" for one in contenders.values()]
    blanks = [""] * (len(_QUANTILES) - 1)
    lines.append(_row("sent by a rank", *[cell for one in sent for cell in (one, *blanks)], ""))
    return "\n".join([*lines, "", _caption(result), ""])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _caption(result: Result) -> str:
    configuration, hardware = result["configuration"], result["hardware"]
    where = hardware.get("accelerator", f"{hardware['num_cores']} cores of {hardware['processor']}")
    return (
        f"{configuration['ranks']} ranks over {configuration['transport']} on {where}, torch "
        f"{result['versions']['torch']}, {configuration['pairs']} calls of each in turn: "
        f"`{result['command']}`"
    )


def main(
    path: Annotated[Path, typer.Argument(help="The Markdown file with markers.")],
) -> None:
    """Bring the tables of a file up to date."""
    path.write_text(fill(path.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
