from pathlib import Path

import pytest
from typer.testing import CliRunner

from epcomm.cli import app
from epcomm.placement.recorder import ExpertLoad

LOAD = ExpertLoad(
    num_ranks=2,
    windows_by_layer={
        "layers.0": ((1, 0, 2, 5), (3, 0, 0, 1)),
        "layers.1": (),
        "layers.2": ((0, 0), (0, 0)),
    },
)


def written(folder: Path) -> Path:
    path = folder / "load.json"
    path.write_text(LOAD.as_json())
    return path


def test_table_has_a_row_for_each_layer(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["load", str(written(tmp_path))])
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    # 4 0 2 6: expert 3 has 6 of 12, and rank 1 has 8.
    assert rows["layers.0"] == ["2", "12", "3", "2.00", "1.33"]
    assert rows["layers.1"] == ["0", "0", "-", "1.00", "-"]
    assert rows["layers.2"] == ["2", "0", "-", "1.00", "1.00"]


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["load", *arguments], prog_name="epcomm")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("epcomm load: ")
    return done.stderr


def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    other, missing = tmp_path / "other.json", tmp_path / "no.json"
    other.write_text("{}")
    assert "does not exist" in refused(str(missing))
    assert "the text is not the load of experts" in refused(str(other))


@pytest.mark.slow
def test_heatmap_is_drawn_or_one_line_says_why_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    good, picture = str(written(tmp_path)), tmp_path / "load.svg"
    done = CliRunner().invoke(app, ["load", good, "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert "<svg" in picture.read_text("utf-8")
    empty = tmp_path / "empty.json"
    empty.write_text(ExpertLoad(num_ranks=2, windows_by_layer={}).as_json())
    assert "nothing to draw" in refused(str(empty), "--plot", str(tmp_path / "load.png"))
    assert "expected a name that ends in one of" in refused(good, "--plot", "load.nothing")
    assert "cannot be written" in refused(good, "--plot", "/dev/null/load.png")
