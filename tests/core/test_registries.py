"""What registers itself at import is registered in a process that imports the public entry only.

Otherwise a feature works in the test suite, where other tests import its module, and not for users.
"""

from __future__ import annotations

import json
import subprocess
import sys

SNAPSHOTS = """
import importlib
import json
import pkgutil
import sys
from collections.abc import Mapping

import graphllm

graphllm.load
from graphllm import backends, models, ops
from graphllm.backends.cuda.runtime.source import MODULES, SOURCES
from graphllm.formats import BLOCK_FORMATS

def shallow(value):
    if isinstance(value, Mapping):
        return sorted(map(str, value))
    return len(value) if isinstance(value, (list, set, tuple)) else value is None

def content(value):
    '''The keys of a mapping, the length of a sequence, and the same of an object's attributes.'''
    if type(value).__module__.startswith("graphllm.") and hasattr(value, "__dict__"):
        return {name: shallow(each) for name, each in sorted(vars(value).items())}
    if isinstance(value, Mapping):
        return {str(name): content(each) for name, each in value.items()}
    return shallow(value)

def snapshot(names):
    return {
        (name, key): content(value)
        for name in names
        for key, value in list(vars(sys.modules[name]).items())
        if not key.startswith("__") and not isinstance(value, type(sys))
    }

found = [backends.find(name) for name in backends.names()]
[each.kernels for each in found]  # their modules are imported at the first use
kernels = [each.kernels for each in found]  # imports their modules
names = [name for name in sys.modules if name == "graphllm" or name.startswith("graphllm.")]
before = snapshot(names)
sources = {module.file for module in MODULES}
for package in (graphllm, models):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # optional packages
                assert error.name in ("cupy", "torch"), error
after = snapshot(names)
print(json.dumps({
    "changed": [".".join(key) for key in after if after[key] != before.get(key)],
    "ops": len(ops.registry()),
    "models": len(models.specs()),
    "formats": len(BLOCK_FORMATS),
    "kernels": {each.name: len(each.kernels) for each in found},
    "probes": [each.name for each in found if each.measure],
    "not compiled": sorted({path.name for path in SOURCES.glob("*.cu")} - sources),
}))
"""


def test_importing_every_module_registers_nothing_more():
    done = subprocess.run([sys.executable, "-c", SNAPSHOTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Functions to compile, if ever: those of the roofline's kernels come with their module.
    pending = "graphllm.backends.cpu.runtime.lazy_numba._functions"
    assert set(found["changed"]) <= {pending} and found["not compiled"] == []
    assert found["ops"] > 40 and found["models"] > 20 and found["formats"] > 10
    assert found["kernels"].keys() >= {"cuda", "cpu", "reference"}
    assert found["kernels"]["cuda"] > 40 and found["kernels"]["cpu"] > 40
    assert {"cuda", "cpu"} <= set(found["probes"])
