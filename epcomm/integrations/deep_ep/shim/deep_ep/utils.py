"""Be deep_ep.utils: all names are those of epcomm.integrations.deep_ep.utils."""

from epcomm.integrations.deep_ep.utils import *  # noqa: F403
