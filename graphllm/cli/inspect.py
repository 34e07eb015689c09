"""The verb ``inspect``: list the metadata and tensors of a model file."""

from __future__ import annotations

from typing import Any

from ..terminal import escape_control
from .declarations import verb
from .options import AsJson, Model
from .output import show, show_json


@verb
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Show the architecture, metadata and tensors of a model file.

    graphllm inspect demo

    graphllm inspect model.gguf --json
    """
    from ..checkpoints.checkpoint import open_checkpoint

    file = open_checkpoint(model)
    tensors = list(file.tensors.values())
    keys = {k: _short(v) for k, v in file.metadata.items()}
    if as_json:
        listed = [
            {"name": t.name, "shape": list(t.shape), "format": str(t.dtype), "bytes": t.nbytes}
            for t in tensors
        ]
        show_json({"path": str(file.path), "metadata": keys, "tensors": listed})
        return
    show(f"{file.path}: {file.kind}, {_short(file.architecture)}")
    for key, value in keys.items():
        show(f"  {key} = {value}")
    sizes: dict[str, list[int]] = {}
    for t in tensors:
        sizes.setdefault(str(t.dtype), []).append(t.nbytes)
        show(f"  {escape_control(t.name):<40} {t.dtype!s:<6} {'x'.join(map(str, t.shape)):>14}")
    for name, parts in sorted(sizes.items(), key=lambda item: -sum(item[1])):
        show(f"{name:<6} {len(parts):>4} tensors {sum(parts) / 1e6:>9.1f} MB")


def _short(value: Any) -> Any:
    """Return a metadata value for display; long arrays are replaced by their length."""
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    if isinstance(value, str):
        return value if len(value) <= 200 else value[:200] + "..."
    if hasattr(value, "__len__"):
        return f"[{len(value)} values]" if len(value) > 16 else [_short(v) for v in value]
    return value.item() if hasattr(value, "item") else value
