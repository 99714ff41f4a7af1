"""The module deep_ep.buffers.legacy, which has the Buffer of V1."""

from epcomm.integrations.deep_ep import Buffer, Config, EventHandle, EventOverlap  # noqa: F401
