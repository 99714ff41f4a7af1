"""Which scenario of the suites notices which mutant, on how many ranks.

    python -m tests.mutants.matrix [words of mutants' names]
    python -m tests.mutants.matrix --text

runs every scenario against every mutant on 1 to 4 ranks, in about a quarter of an hour of two
cores, and writes matrix.json and matrix.md; --text writes matrix.md alone, without running any.
test_matrix.py holds both against the mutants and the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.base import Mutant
from tests.mutants.catalog import ROWS, WORLDS

FOLDER = Path(__file__).parent
REPO = FOLDER.parents[1]
JSON, MARKDOWN = FOLDER / "matrix.json", FOLDER / "matrix.md"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """noticed: by number of ranks, then mutant: the scenarios that notice it."""

    noticed: dict[int, dict[str, list[str]]]

    @classmethod
    def read(cls) -> Matrix:
        """The one that is committed."""
        found = json.loads(JSON.read_text("utf-8"))
        return cls(noticed={int(world): rows for world, rows in found.items()})

    def write(self) -> None:
        """As JSON and as text."""
        JSON.write_text(json.dumps(self.noticed, indent=1) + "\n", "utf-8")
        MARKDOWN.write_text(self.as_text(), "utf-8")

    def by(self, mutant: Mutant, world: int) -> list[str]:
        """The scenarios that notice a mutant on so many ranks."""
        return self.noticed[world].get(mutant.key, [])

    def alone(self, suite: str, scenario: str, world: int) -> list[str]:
        """Names of the mutants that this scenario alone notices on so many ranks."""
        return [
            mutant.name
            for mutant in ROWS
            if mutant.suite == suite and self.by(mutant, world) == [scenario]
        ]

    def beyond_two(self, world: int) -> dict[str, list[str]]:
        """Mutants that 2 ranks do not show and `world` ranks do: the scenarios, by name."""
        return {
            mutant.name: self.by(mutant, world)
            for mutant in ROWS
            if self.by(mutant, world) and not self.by(mutant, 2)
        }

    def as_text(self) -> str:
        """Both tables."""
        lines = [
            "# Which scenario notices which fault",
            "",
            "Written by `python -m tests.mutants.matrix`, not by hand. A mutant is the library",
            "with one fault; tests/mutants holds them, tests/testing those of deep_ep.",
        ]
        for suite in ("buffer", "layer"):
            names = dict.fromkeys(name for m in ROWS if m.suite == suite for name in m.scenarios)
            lines += ["", f"## What a scenario of the {suite} suite alone notices", ""]
            lines += ["| scenario | on 2 ranks | on others, and not on 2 |", "|---|---|---|"]
            for name in names:
                two = ", ".join(dict.fromkeys(self.alone(suite, name, 2)))
                others = [
                    f"{world}: {', '.join(here)}"
                    for world in WORLDS
                    if (
                        here := [
                            m for m in self.alone(suite, name, world) if m in self.beyond_two(world)
                        ]
                    )
                ]
                lines.append(f"| {name} | {two} | {'; '.join(others)} |")
        lines += ["", "## Who notices a mutant", ""]
        lines += ["| mutant | fault | environment | ranks: scenarios |", "|---|---|---|---|"]
        for mutant in ROWS:
            found = "; ".join(
                f"{world}: {self._names(mutant, world)}"
                for world in WORLDS
                if self.by(mutant, world)
            )
            says = mutant.says.rstrip(".")
            lines.append(f"| {mutant.name} | {says} | {mutant.environment} | {found} |")
        return "\n".join(lines) + "\n"

    def _names(self, mutant: Mutant, world: int) -> str:
        noticed = self.by(mutant, world)
        if len(noticed) > len(mutant.scenarios) / 2:
            missing = [name for name in mutant.scenarios if name not in noticed]
            return f"all but {', '.join(missing)}" if missing else "all"
        return ", ".join(noticed)


def play(world: int, words: list[str]) -> dict[str, list[str]]:
    """Run all cells of one number of ranks in one launch."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "cells.json")
        launcher = str(REPO / "scripts" / "launch_multi_rank.sh")
        program = str(FOLDER / "cells.py")
        subprocess.run(
            [launcher, str(world), program, str(output), *words],
            env=os.environ | {"PYTHON": sys.executable},
            cwd=REPO,
            check=True,
        )
        found: dict[str, dict[str, str]] = json.loads(output.read_text("utf-8"))
    wrong = {
        key: row for key, row in found.items() if key.startswith("nothing") and any(row.values())
    }
    if wrong:
        raise SystemExit(f"{world} ranks: scenarios fail without a mutant: {wrong}")
    return {
        key: [scenario for scenario, failure in row.items() if failure]
        for key, row in found.items()
        if not key.startswith("nothing")
    }


def main() -> None:
    """Play the mutants whose names hold one of the words, or all; the rest stays as it is."""
    words = sys.argv[1:]
    if words == ["--text"]:
        Matrix.read().write()
        return
    noticed = Matrix.read().noticed if words else {}
    for world in WORLDS:
        noticed[world] = {**noticed.get(world, {}), **play(world, words)}
    keys = [mutant.key for mutant in ROWS]
    Matrix(
        noticed={
            world: {key: rows[key] for key in keys if key in rows}
            for world, rows in noticed.items()
        }
    ).write()


if __name__ == "__main__":
    main()
