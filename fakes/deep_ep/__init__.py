"""Stand in for the packages that install as `deep_ep`: the same calls, over processes on CPUs.

A stand-in returns what the real package returns, bit for bit where that is defined, and NaN or
arbitrary values where the real package leaves memory unwritten. It refuses what the real package
refuses (limits.py). Those of V1 and V2 are epcomm.integrations.deep_ep with these limits on top.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType

NAME = "deep_ep"
# Kind -> the module that shows what the root of the real package shows.
_MODULES = MappingProxyType(
    {
        "v1": "fakes.deep_ep.strict_v1",
        "v2": "fakes.deep_ep.strict_v2",
        "ascend": "fakes.ascend.deep_ep",
        "ascend_flags": "fakes.ascend.deep_ep_flags",
    }
)
# Kind -> submodules that users of the real package import by name.
_SUBMODULES = MappingProxyType({"ascend": ("buffer",), "ascend_flags": ("buffer",)})


@contextmanager
def install(kind: str) -> Iterator[ModuleType]:
    """While open, `import deep_ep` imports the fake of this kind.

    `importlib.util.find_spec("deep_ep")` finds the fake's folder, so that code that reads the
    sources of the package recognises it. The earlier deep_ep is restored.

    Process-wide: every thread sees it.

    Raises:
        ValueError: no fake of that kind.
    """
    if kind not in _MODULES:
        raise ValueError(f"install: kind is {kind!r}, expected one of {', '.join(_MODULES)}")
    module = _as_deep_ep(importlib.import_module(_MODULES[kind]))
    installed = {NAME: module}
    for name in _SUBMODULES.get(kind, ()):
        submodule = importlib.import_module(f"{_MODULES[kind]}.{name}")
        setattr(module, name, submodule)
        installed[f"{NAME}.{name}"] = submodule
    before = {name: sys.modules.get(name) for name in installed}
    sys.modules.update(installed)
    try:
        yield module
    finally:
        for name, earlier in before.items():
            if earlier is None:
                del sys.modules[name]
            else:
                sys.modules[name] = earlier


def _as_deep_ep(fake: ModuleType) -> ModuleType:
    assert fake.__file__ is not None, "a fake is a package with sources"
    spec = ModuleSpec(NAME, loader=None, origin=fake.__file__, is_package=True)
    spec.submodule_search_locations = [str(Path(fake.__file__).parent)]
    module = ModuleType(NAME, fake.__doc__)
    module.__spec__ = spec
    module.__file__ = fake.__file__
    # Not __path__: `import deep_ep.config` would load a second copy of the fake.
    for name in [*fake.__all__, "__all__"]:
        setattr(module, name, getattr(fake, name))
    return module
