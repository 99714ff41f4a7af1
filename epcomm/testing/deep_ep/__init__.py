"""Stand-ins for the packages that install as `deep_ep`, over processes on CPUs and gloo."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType

# Kind -> the module that stands in for the package.
STAND_INS: Mapping[str, str] = MappingProxyType(
    {"v1": "epcomm.testing.deep_ep.v1", "v2": "epcomm.testing.deep_ep.v2"}
)


def install(kind: str) -> ModuleType:
    """Make `import deep_ep` of this process give the stand-in of a kind, and return it.

    Raises:
        ValueError: the kind is not listed.
    """
    if kind not in STAND_INS:
        raise ValueError(f"install: kind is {kind!r}, expected one of {sorted(STAND_INS)}")
    stand_in = importlib.import_module(STAND_INS[kind])
    assert stand_in.__file__ is not None, "a stand-in is a package on disk"
    # Whoever asks which package this is reads the sources in the folder of the spec.
    spec = ModuleSpec("deep_ep", None, origin=stand_in.__file__, is_package=True)
    spec.submodule_search_locations = [str(Path(stand_in.__file__).parent)]
    module = ModuleType("deep_ep", stand_in.__doc__)
    module.__dict__.update(
        {name: value for name, value in vars(stand_in).items() if not name.startswith("__")},
        __spec__=spec,
        __file__=stand_in.__file__,
        __path__=spec.submodule_search_locations,
    )
    sys.modules["deep_ep"] = module
    return module
