"""FuseEP: one operator of an Ascend NPU dispatches, computes W8A8 experts and combines.

A fused operator is not a dispatcher: it has weights of its own layout and limits of its own. Mode 1
is FusedDeepMoE, mode 2 DispatchFFNCombine; both are of A3. Nothing here ran on an NPU.
"""

from epcomm.fuseep.base import FuseEPResult
from epcomm.fuseep.path import FuseEPPath

__all__ = ["FuseEPPath", "FuseEPResult"]
