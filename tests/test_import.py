import json
import subprocess
import sys

# torch is imported first, with its lazy imports, whose effects are not those of epcomm.
PROBE = """
import json, os, sys
import torch, torch.distributed.device_mesh, torch.utils.checkpoint
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

folder = Path(find_spec("epcomm").origin).parent
package = str(folder)
reads, device_calls = [], []


def note_read(name):
    original = getattr(type(os.environ), name)

    def wrapper(self, *args):
        frame = sys._getframe(1)
        while frame.f_code.co_filename == os.__file__ or "_collections_abc" in str(frame.f_code):
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(package):
            reads.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return original(self, *args)

    setattr(type(os.environ), name, wrapper)


def note_device_call(name):
    original = getattr(torch.cuda, name)

    def wrapper(*args, **kwargs):
        device_calls.append(name)
        return original(*args, **kwargs)

    setattr(torch.cuda, name, wrapper)


for name in ("__getitem__", "__iter__"):
    note_read(name)
for name in ("_lazy_init", "is_available", "device_count", "current_device"):
    note_device_call(name)
before = set(sys.modules)
import epcomm, epcomm.kernels, epcomm.quantization

imported = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
at_import = list(reads)
epcomm.EPConfig.from_env({})
assert not reads, "an explicit mapping needs no environment"
epcomm.config.environment()
found = {
    "imported": imported,
    "for_tests": [m for m in sys.modules if m.startswith(("epcomm.testing", "fakes"))],
    "reads_at_import": at_import,
    "reads_by_environment": len(reads),
    "device_calls": list(device_calls),
    "cuda_is_initialized": torch.cuda.is_initialized(),
}

# Import the rest of the package, module by module, if its dependencies are installed.
modules = []
for path in sorted(folder.rglob("*.py")):
    name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
    if name.startswith("epcomm.testing.") or name.endswith("__main__"):
        continue
    try:
        import_module(name.removesuffix(".__init__"))
    except ModuleNotFoundError as error:
        # Modules of the drop-in that DeepEP has and epcomm refuse their import by their own names.
        of_others = ("triton", "mpi4py", "transformers", "deep_ep")
        if error.name != name and error.name.partition(".")[0] not in of_others:
            raise
    modules.append(name)
packages = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({**found, "modules": modules, "packages": packages}))
"""
# Importing these affects the process, or fails without a device.
NEVER_IMPORTED = {"deep_ep", "deep_gemm", "torch_npu"}


def test_import_touches_no_vendor_package_device_or_environment() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["reads_by_environment"] > 0, "the probe would not see a read"
    # tomllib reads configurations.
    assert {"epcomm"} <= set(found["imported"]) <= {"epcomm", "tomllib"}
    assert found["for_tests"] == []
    assert found["reads_at_import"] == []
    assert found["device_calls"] == []
    assert not found["cuda_is_initialized"]
    # No other module imports a package with effects.
    assert {"epcomm.moe", "epcomm.buffers.ascend.packed", "epcomm.runners.ascend.runner"} <= set(
        found["modules"]
    )
    assert not NEVER_IMPORTED & set(found["packages"])


def test_collecting_the_tests_imports_none_either() -> None:
    """Check after collection, which imports the test files; tests install imitations later."""
    assert not NEVER_IMPORTED & set(sys.modules)
