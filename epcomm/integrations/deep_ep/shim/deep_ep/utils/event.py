"""The module deep_ep.utils.event."""

from epcomm.integrations.deep_ep import EventHandle, EventOverlap  # noqa: F401
