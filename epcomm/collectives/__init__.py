"""The collective operations that every transport implements, and the transports."""

from epcomm.collectives.base import Collectives

__all__ = ["Collectives"]
