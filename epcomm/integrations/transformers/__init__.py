"""Run models of transformers on epcomm; transformers is imported inside functions that need it.

reading.py reads a MoE block by its structure, with structure.py, routings.py and probing.py;
expert_parallel.py lets transformers load whole models with epcomm, whatever their blocks;
trainer.py lets its Trainer train, save and resume models with such blocks.
"""

from epcomm.integrations.transformers.expert_parallel import (
    ExpertParallelRegistration,
    register_expert_parallel,
)
from epcomm.integrations.transformers.reading import from_transformers
from epcomm.integrations.transformers.trainer import prepare_trainer

__all__ = ["ExpertParallelRegistration", "register_expert_parallel"]
__all__ += ["from_transformers", "prepare_trainer"]
