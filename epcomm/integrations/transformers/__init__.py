"""Models of transformers on epcomm; transformers is imported where it must be, and nowhere else.

families.py says what each kind of MoE block is made of, reading.py reads a block accordingly;
expert_parallel.py lets transformers load whole models with epcomm, whatever their blocks.
"""

from epcomm.integrations.transformers.expert_parallel import (
    ExpertParallelRegistration,
    register_expert_parallel,
)
from epcomm.integrations.transformers.families import FAMILIES, BlockFamily
from epcomm.integrations.transformers.reading import from_transformers

__all__ = [
    "FAMILIES",
    "BlockFamily",
    "ExpertParallelRegistration",
    "from_transformers",
    "register_expert_parallel",
]
