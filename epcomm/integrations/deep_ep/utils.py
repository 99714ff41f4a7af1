"""The module that clients import as `deep_ep.utils`: events."""

from epcomm.integrations.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
