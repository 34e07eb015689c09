"""Oracle that runs a model of transformers in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from ..checkpoints.checkpoint import Checkpoint
from ..errors import RequestError
from ..model.spec import ModelSpec
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


def model_class(spec: ModelSpec) -> Any:
    """Return transformers' class that loads models of this kind, encoders without a head."""
    import transformers

    if spec.is_encoder:
        return transformers.AutoModel
    if spec.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def has_model(kind: str, spec: ModelSpec) -> bool:
    """Whether transformers has a model of this ``model_type`` and of the kind of ``spec``."""
    from transformers import CONFIG_MAPPING

    return kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in model_class(spec)._model_mapping


class TransformersOracle(ModuleOracle):
    """A model of transformers: a causal language model, an encoder, or an encoder-decoder.

    Args:
        model: the model.
        inside: path of the model among the paths to compare, as "bert"; empty for none.
        lines: see `Oracle`.
    """

    def __init__(self, model: Any, inside: str = "", lines: Sequence[str] = ()) -> None:
        import torch
        import transformers

        name = f"transformers {transformers.__version__} {type(model).__name__}"
        self._own, outer = model, model
        for part in reversed(inside.split(".") if inside else []):
            outer, inner = torch.nn.Module(), outer
            outer.add_module(part, inner)
        super().__init__(outer, name, lines)

    @classmethod
    def load(cls, file: Checkpoint, spec: ModelSpec) -> TransformersOracle:
        """Load a directory; RequestError with the message of transformers if that fails."""
        import torch

        try:
            with quiet():
                loaded: Any = model_class(spec).from_pretrained(
                    file.path, dtype=torch.float32, local_files_only=True,
                    output_loading_info=True, **EAGER_OPTIONS,
                )  # fmt: skip
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            text = " ".join(str(error).split())
            raise RequestError(f"transformers cannot load {file.path}: {text[:300]}") from None
        model, info = loaded
        # An encoder is compared without its head, which may be in the file.
        words = ("missing_keys", "mismatched_keys", "unexpected_keys")[
            : 2 if spec.is_encoder else 3
        ]
        lines = [
            f"transformers: {word.replace('_', ' ')}: {', '.join(sorted(map(str, info[word])))}"
            for word in words
            if info.get(word)
        ]
        inside = spec.config(file.keys(spec)).names.model if spec.is_encoder else ""
        return cls(model.eval(), inside, lines)

    def forward(self, ids: Any) -> Any:
        """Return the output for ids [1, T]; those of a source are as `source_tokens` has them."""
        source = int((ids < 0).sum())
        if source:
            given = {"input_ids": ~ids[:, :source], "decoder_input_ids": ids[:, source:]}
            return self._own(**given, use_cache=False)
        if hasattr(self._own.config, "use_cache"):
            return self._own(ids, use_cache=False)
        return self._own(ids)
