"""Be deep_ep.utils.event."""

from epcomm.integrations.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
