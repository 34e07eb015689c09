"""transformers as the oracle: float32, on the CPU, with what its modules read and return."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ..errors import RequestError
from .oracle import Attended, Record, Wanted

_EAGER = "eager_attention_forward"  # what modelling files of transformers call theirs
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}  # how modules compute
_SMALL = 50_000_000  # weights of a model whose matrices are not worth several threads
_FACTS = ("eps", "variance_epsilon", "epsilon")


def require() -> None:
    """RequestError without the extra."""
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise RequestError(
                f"validate compares with transformers, and {name} is not installed: "
                "pip install 'graphllm[parity]', or give an --oracle"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without progress bars and remarks."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def known(kind: str) -> bool:
    """Whether transformers has a causal language model of this ``model_type``."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING


class TransformersOracle:
    """A causal language model of transformers."""

    traced = True

    def __init__(self, model: Any, lines: Sequence[str] = ()) -> None:
        import transformers

        self.model, self.lines = model, lines
        self.name = f"transformers {transformers.__version__} {type(model).__name__}"

    @classmethod
    def load(cls, folder: Path) -> TransformersOracle:
        """Of a directory. RequestError with what transformers says where it cannot."""
        import torch
        from transformers import AutoModelForCausalLM

        try:
            with quiet():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, local_files_only=True, output_loading_info=True,
                    **PLAIN,
                )  # fmt: skip
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            text = " ".join(str(error).split())
            raise RequestError(f"transformers cannot load {folder}: {text[:300]}") from None
        model, info = loaded
        lines = [
            f"transformers: {word.replace('_', ' ')}: {', '.join(sorted(map(str, info[word])))}"
            for word in ("missing_keys", "unexpected_keys", "mismatched_keys")
            if info.get(word)
        ]
        return cls(model.eval(), lines)

    def run(self, ids: Sequence[int], wanted: Wanted = lambda path: False) -> Record:
        import torch

        record = Record(np.zeros(0))
        with ExitStack() as stack, torch.no_grad():
            if sum(weight.numel() for weight in self.model.parameters()) < _SMALL:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)  # they would wait for each other, long on a busy machine
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
            record.logits = _array(self.model(torch.tensor([list(ids)]), use_cache=False).logits)
        return record

    def _watch(self, stack: ExitStack, record: Record, path: str, module: Any) -> None:
        """Keep what a module reads and returns."""

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


def _spy(record: Record, paths: Mapping[Any, str], eager: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that also notes what it reads and gives."""

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        out = eager(module, query, key, value, *args, **options)
        if module in paths:
            q, k, v, result = map(_array, (query, key, value, out[0]))
            record.attended[paths[module]] = Attended(q, k, v, result, options)
        return out

    return attention


def _tensor(found: Any) -> Any:
    """The first tensor of floats in what a module reads or returns, None if there is none."""
    import torch

    if isinstance(found, torch.Tensor):
        return found if found.is_floating_point() else None
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, (tuple, list)):
        return next((t for each in found if (t := _tensor(each)) is not None), None)
    return None


def _array(tensor: Any) -> np.ndarray:
    """float64, without the axis of the one sequence."""
    array = tensor.detach().float().numpy().astype(np.float64)
    return array[0] if array.ndim > 2 and array.shape[0] == 1 else array
