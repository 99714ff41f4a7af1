"""Run a program, and all processes that it starts, with the drop-in in place of deep_ep.

    python -m epcomm.integrations.deep_ep serve.py --port 8000
    python -m epcomm.integrations.deep_ep -m vllm.entrypoints.openai.api_server --model ...
    python -m epcomm.integrations.deep_ep torchrun --nproc-per-node 8 train.py

With --replace before the program, the drop-in replaces an installed deep_ep.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from epcomm.config import environment
from epcomm.errors import ConfigError
from epcomm.integrations.deep_ep.installing import SHIM, check_alone

_USAGE = "usage: python -m epcomm.integrations.deep_ep [--replace] PROGRAM [ARGUMENT ...]"


def command_of(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a file of Python, `-m MODULE`, or a command."""
    if not arguments:
        raise ConfigError(f"deep_ep: no program is named; {_USAGE}")
    program = arguments[0]
    if program == "-m" or Path(program).is_file():
        return [sys.executable, *arguments]
    found = shutil.which(program)
    if found is None:
        raise ConfigError(f"deep_ep: {program} is neither a file nor a command; {_USAGE}")
    return [found, *arguments[1:]]


def main(arguments: Sequence[str]) -> NoReturn:
    """Become the program, with the folder of the drop-in first in PYTHONPATH."""
    replace = arguments[:1] == ["--replace"]
    try:
        check_alone(replace=replace)
        command = command_of(arguments[1:] if replace else arguments)
    except ConfigError as error:
        sys.exit(str(error))
    variables = dict(environment())
    path = [str(SHIM), *filter(None, [variables.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(path)
    os.execve(command[0], command, variables)


if __name__ == "__main__":
    main(sys.argv[1:])
