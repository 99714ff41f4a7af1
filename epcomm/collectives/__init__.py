"""The three verbs that a plain transport offers, and the transports that offer them."""

from epcomm.collectives.base import Collectives

__all__ = ["Collectives"]
