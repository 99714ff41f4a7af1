"""Models of transformers on epcomm; transformers is imported where it must be, and nowhere else.

reading.py reads a MoE block by its structure, with structure.py, routings.py and probing.py;
expert_parallel.py lets transformers load whole models with epcomm, whatever their blocks.
"""

from epcomm.integrations.transformers.expert_parallel import (
    ExpertParallelRegistration,
    register_expert_parallel,
)
from epcomm.integrations.transformers.reading import from_transformers

__all__ = [
    "ExpertParallelRegistration",
    "from_transformers",
    "register_expert_parallel",
]
