"""Combine masks with comparisons of scalars."""

import triton
import triton.language as tl


@triton.jit
def both(mask: tl.tensor, condition: tl.tensor) -> tl.tensor:
    """Return `mask` where `condition`, a comparison of scalars, holds; booleans.

    Triton's interpreter broadcasts such a comparison in the dtype of its operands, which makes
    `mask & condition` integers there, and its version 3.9 takes only booleans as masks. In compiled
    code `!= 0` adds no instruction.
    """
    return (mask & condition) != 0
