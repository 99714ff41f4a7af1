"""The module deep_ep.buffers.elastic, which has the ElasticBuffer of V2."""

from epcomm.integrations.deep_ep import ElasticBuffer, EPHandle, EventHandle, EventOverlap  # noqa: F401
