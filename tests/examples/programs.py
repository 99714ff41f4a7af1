"""Run programs of the repository on the ranks of a test, in their process group."""

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

REPO = Path(__file__).parents[2]
EXAMPLES = REPO / "examples"


def run_program(program: Path, *arguments: str) -> str:
    """Run a program on all ranks, and return what this rank prints. Collective.

    Raises:
        SystemExit: the program failed; the exception has its message.
    """
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(dist, "init_process_group", lambda *_, **__: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        patch.setattr(sys, "argv", [str(program), *arguments])
        patch.syspath_prepend(program.parent)
        # A fixed width, because the width of the terminal changes the output.
        patch.setenv("COLUMNS", "80")
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return printed.getvalue()
