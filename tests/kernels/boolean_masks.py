"""Require boolean masks in Triton's interpreter, as the interpreter of Triton 3.9 does."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def boolean_masks() -> Iterator[None]:
    """Raise TypeError at a masked load or store whose mask is stored as integers."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    with pytest.MonkeyPatch.context() as patch:
        # The index of the mask among the arguments.
        for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
            patch.setattr(builder, name, _checked(getattr(builder, name), place))
        yield


def _checked(method: Callable[..., Any], place: int) -> Callable[..., Any]:
    def checked(builder: object, *arguments: Any, **others: Any) -> Any:  # noqa: ANN401
        mask = arguments[place]
        # The mask of a descriptor is an array up to Triton 3.7.
        kind = (mask if isinstance(mask, np.ndarray) else mask.data).dtype
        if kind != np.bool_:
            raise TypeError(f"a mask is {kind}, expected booleans; take both() of kernels.masks")
        return method(builder, *arguments, **others)

    return checked
