"""Commands whose options are the fields of records, which typer reads from one flat signature."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature
from typing import get_type_hints


def takes_records(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each field of the records that `command` takes.

    A field has the annotation and the default of its option. Worked example:

        @dataclass(frozen=True, kw_only=True)
        class Sizes:
            hidden: Annotated[int, typer.Option(help="H.")] = 1024

        @takes_records
        def run(sizes: Sizes) -> None: ...       # run(*, hidden: ... = 1024)
    """
    hints = get_type_hints(command)
    records: dict[str, type] = {
        name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)
    }
    parameters: list[Parameter] = []
    for kind in records.values():
        annotations = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            option = Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default)
            parameters.append(option.replace(annotation=annotations[field.name]))

    def run(**values: object) -> None:
        command(
            **{
                name: kind(**{field.name: values[field.name] for field in fields(kind)})
                for name, kind in records.items()
            }
        )

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    # typer reads it in place of **values.
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run
