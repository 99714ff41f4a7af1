"""Refuse bad input of commands in one line on stderr, with exit code 2."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, cast

import typer
from typer.core import TyperGroup

from epcomm.bench.ranks import BAD_INPUT

# The class of typer's errors about options and arguments: click's, or in some releases typer's own.
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])


class BadInput(typer.BadParameter):
    """Bad input of a command; the message is the whole line."""


class OneLineGroup(TyperGroup):
    """A command whose subcommands report bad input in one line, without usage and a box."""

    def main(
        self,
        args: Sequence[str] | None = None,
        *rest: Any,  # noqa: ANN401
        standalone_mode: bool = True,
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        run = partial(super().main, args, *rest, standalone_mode=False, **options)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except _UsageError as error:
            refuse(self._line(error, sys.argv[1:] if args is None else args))
        except typer.Abort:
            refuse("epcomm: it was interrupted")
        sys.exit(code if isinstance(code, int) else 0)

    def _line(self, error: Any, args: Sequence[str]) -> str:  # noqa: ANN401
        if isinstance(error, BadInput):
            return error.message
        # The error of an option without its value does not name the command.
        own = " ".join(["epcomm", *(each for each in args[:1] if each in self.commands)])
        command = own if error.ctx is None else error.ctx.command_path
        return f"{command}: {' '.join(error.format_message().split())} (see {command} --help)"


def refuse(line: str) -> NoReturn:
    """Write one line and exit with code 2."""
    # A file that the line names may have a line break in its name.
    sys.stderr.write(f"{' '.join(line.splitlines())}\n")
    sys.exit(BAD_INPUT)
