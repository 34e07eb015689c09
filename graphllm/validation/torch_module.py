"""Oracle that runs a torch module in float32 on the CPU and records its submodules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np

from ..errors import ModelFileError
from ..model.batch import source_length
from .oracle_record import AttentionRecord, OracleRecord, PathFilter

_EAGER = "eager_attention_forward"  # its name in modelling files of transformers
_SMALL = 50_000_000  # parameters up to which one thread is faster
_FACTS = ("eps", "variance_epsilon", "epsilon")


def is_module(value: object) -> bool:
    """Whether ``value`` is a torch.nn.Module; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


class ModuleOracle:
    """A module that computes logits [1, T, vocab] from ids [1, T].

    Inputs and outputs of its submodules are compared with the scopes of the same path.
    """

    def __init__(self, model: Any, name: str, lines: Sequence[str] = ()) -> None:
        self.model, self.name, self.lines = model.eval().float(), name, lines

    def forward(self, ids: Any) -> Any:
        """Return the module's output for ``ids`` [1, T]."""
        return self.model(ids)

    def run(self, ids: Sequence[int], wanted: PathFilter = lambda path: False) -> OracleRecord:
        import torch

        record = OracleRecord(np.zeros(0))
        with ExitStack() as stack, torch.no_grad():
            if sum(weight.numel() for weight in self.model.parameters()) < _SMALL:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)  # several would wait for each other on a busy machine
            spied: dict[str, dict[Any, str]] = {}
            for path, module in self.model.named_modules():
                if path and wanted(path):
                    self._watch(stack, record, path, module)
                    spied.setdefault(type(module).__module__, {})[module] = path
            for name, paths in spied.items():
                home = sys.modules.get(name)
                if hasattr(home, _EAGER):
                    spy = _spy(record, paths, getattr(home, _EAGER))
                    stack.enter_context(mock.patch.object(home, _EAGER, spy))
            found = self.forward(torch.tensor([list(ids)]))
            record.logits = self._logits(found, len(ids) - source_length(ids))
        return record

    def _logits(self, found: Any, tokens: int) -> np.ndarray:
        """Extract logits [T, vocab], or hidden states [T, dim], from the module's output.

        ModelFileError if there are none.
        """
        found = getattr(found, "logits", getattr(found, "last_hidden_state", found))
        if isinstance(found, Mapping):
            found = found.get("logits")
        tensor = _tensor(found)
        logits = np.zeros(0) if tensor is None else _array(tensor)
        if logits.ndim != 2 or len(logits) != tokens:
            shape = "no floats" if tensor is None else list(tensor.shape)
            want = f"[1, {tokens}, vocabulary]"
            raise ModelFileError(f"{self.name} returned {shape}, expected {want}")
        return logits

    def _watch(self, stack: ExitStack, record: OracleRecord, path: str, module: Any) -> None:
        """Record inputs and outputs of a module."""

        def hook(_: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
            returned = _tensor(out)
            read = _tensor([*args, *kwargs.values()])
            if returned is not None:
                record.returned[path] = _array(returned)
            if read is not None:
                record.read[path] = _array(read)
            record.modules[path] = type(module).__name__
            record.facts[path] = {n: getattr(module, n) for n in _FACTS if hasattr(module, n)}

        handle = module.register_forward_hook(hook, with_kwargs=True)
        stack.callback(handle.remove)


def _spy(
    record: OracleRecord, paths: Mapping[Any, str], eager: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap an attention function so that it records its inputs and result."""

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        out = eager(module, query, key, value, *args, **options)
        if module in paths:
            q, k, v, result = map(_array, (query, key, value, out[0]))
            record.attended[paths[module]] = AttentionRecord(q, k, v, result, options)
        return out

    return attention


def _tensor(found: Any) -> Any:
    """Return the first float tensor in a module's inputs or outputs, or None."""
    import torch

    if isinstance(found, torch.Tensor):
        return found if found.is_floating_point() else None
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, (tuple, list)):
        return next((t for each in found if (t := _tensor(each)) is not None), None)
    return None


def _array(tensor: Any) -> np.ndarray:
    """Convert to a float64 array, without the axis of the single sequence."""
    array = tensor.detach().float().numpy().astype(np.float64)
    return array[0] if array.ndim > 2 and array.shape[0] == 1 else array
