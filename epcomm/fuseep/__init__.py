"""FuseEP: one operator of an Ascend NPU dispatches, computes W8A8 experts and combines.

A fused operator is not a dispatcher: it has its own layout of weights and its own limits. Mode 1 is
FusedDeepMoE, mode 2 is DispatchFFNCombine, and mode 3 is MegaMoE, all on A3. No code of this folder
has run on an NPU.
"""

from epcomm.buffers.fused import FuseEPResult
from epcomm.fuseep.path import FuseEPPath

__all__ = ["FuseEPPath", "FuseEPResult"]
