"""The three collective operations that a transport offers, and the transports."""

from epcomm.collectives.base import Collectives

__all__ = ["Collectives"]
