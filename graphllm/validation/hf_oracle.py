"""Oracle that runs a model of transformers in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import RequestError
from .torch_module import ModuleOracle

EAGER_OPTIONS = {"attn_implementation": "eager", "experts_implementation": "eager"}


def require_transformers() -> None:
    """Raise RequestError if torch or transformers is not installed."""
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise RequestError(
                f"validate compares with transformers, and {name} is not installed: "
                "pip install 'graphllm[parity]', or pass --oracle FILE"
            )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and warnings of transformers."""
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


def has_causal_lm(kind: str) -> bool:
    """Whether transformers has a causal language model of this ``model_type``."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING


class TransformersOracle(ModuleOracle):
    """A causal language model of transformers."""

    def __init__(self, model: Any, lines: Sequence[str] = ()) -> None:
        import transformers

        name = f"transformers {transformers.__version__} {type(model).__name__}"
        super().__init__(model, name, lines)

    @classmethod
    def load(cls, folder: Path) -> TransformersOracle:
        """Load a directory; RequestError with the message of transformers if that fails."""
        import torch
        from transformers import AutoModelForCausalLM

        try:
            with quiet():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, local_files_only=True, output_loading_info=True,
                    **EAGER_OPTIONS,
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

    def forward(self, ids: Any) -> Any:
        return self.model(ids, use_cache=False)
