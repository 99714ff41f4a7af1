"""Write the results of benchmarks into a Markdown file, between markers.

    python -m benchmarks.readme_table README.md docs/performance.md

replaces the text between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->` by the tables of
benchmarks/results/NAME.json. Several names with commas make one table of whole layers.
"""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.tables import render

RESULTS = Path(__file__).parent / "results"

_MARKED = re.compile(
    r"(?P<start><!-- benchmark:(?P<names>[\w,-]+) -->\n).*?"
    r"(?P<end><!-- /benchmark -->)",
    re.DOTALL,
)


def fill(text: str, results: Path = RESULTS) -> str:
    """Return `text` with fresh tables between each pair of markers.

    Raises:
        FileNotFoundError: a marker names a result that does not exist.
    """

    def table(match: re.Match[str]) -> str:
        paths = [results / f"{name}.json" for name in match["names"].split(",")]
        found = [json.loads(path.read_text("utf-8")) for path in paths]
        return f"{match['start']}{render(*found)}{match['end']}"

    return _MARKED.sub(table, text)


def main(
    paths: Annotated[list[Path], typer.Argument(help="Markdown files with markers.")],
) -> None:
    """Update the tables of files."""
    for path in paths:
        path.write_text(fill(path.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
