"""The module deep_ep.buffer of deep_ep 1.x."""

from epcomm.integrations.deep_ep import Buffer, Config, EventHandle, EventOverlap  # noqa: F401
