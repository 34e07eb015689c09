"""Loading a model: what was asked for is checked, then the file is opened, placed and prepared."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import backends as registry
from ..arguments import (
    OneOf,
    Optional,
    Rule,
    Whole,
    check,
    flag,
    function,
    path,
    refused,
    text,
    text_by_text,
    texts,
)
from ..backends import Options
from ..checkpoints.model_file import ModelFile, open_model
from ..compiler import fusion
from ..errors import PlacementError
from ..graph.dtype import CACHED
from ..model.decoder import Decoder
from ..model.inputs import Limits
from ..runtime.executor import Progress
from ..runtime.gpu_offload import checked
from .llm import LLM

DEFAULT_CONTEXT = 4096


def _model(name: str, value: Any) -> Any:
    """A path, a name, or an open model file."""
    if all(hasattr(value, part) for part in ("family", "keys", "weights")):
        return value
    if isinstance(value, (str, os.PathLike)):
        return path(name, value)
    raise refused(name, value, "a path, the name of a model or an open model file")


# Of the arguments of `load`, and of what else takes the same.
RULES: dict[str, Rule] = {
    "model": _model,
    "model_def": Optional(path),
    "type": Optional(text),
    "device": text,
    "gpu_layers": checked,
    "context": Whole(1),
    "kv_type": Optional(OneOf(CACHED)),
    "linear": OneOf(("auto", "integer", "float")),
    "threads": Whole(0),
    "place": Optional(text_by_text),
    "strict": flag,
    "no_fuse": texts,
    "no_kernels": texts,
    "chat_template": Optional(path),
    "progress": Optional(function),
}


def decoder_for(
    file: ModelFile, model_def: str | Path | None = None, kind: str | None = None,
    backends: Sequence[str] | None = None, options: Options | None = None,
) -> Decoder:  # fmt: skip
    """The family's decoder over the file's weights, quantised to ``kind`` by one of the backends.

    ModelFileError for an unknown family, ConfigError for a key that it does not know.
    """
    from .. import models

    family = file.family() if model_def is None else models.own(model_def)
    keys = file.keys(family)
    config = family.config(keys)
    keys.finish()
    weights = file.weights(family, config)
    if kind is not None:
        from ..checkpoints.requantize import Quantised

        router = f".{config.names.router}.weight"  # small, and what it decides is delicate
        weights = Quantised(weights, kind, lambda name: name.endswith(router), backends, options)
    return family.model(config, weights)


def options_from(given: Mapping[str, Any]) -> Options:
    """The `Options` of arguments that were checked. RequestError or GraphError names a rule or a
    kernel that is not known."""
    fusion.check_names(given["no_fuse"])
    registry.check_switches(given["no_kernels"])
    return Options(given["linear"], given["threads"], given["no_fuse"], given["no_kernels"])


def limits_from(context: int, kv_type: str | None, device: str) -> Limits:
    """What a graph is built for, of one sequence."""
    return Limits(context=context, kv_dtype=kv_type or ("f32" if device == "reference" else "f16"))


def load(
    model: str | Path | ModelFile,
    *,
    model_def: str | Path | None = None,
    type: str | None = None,
    device: str = "auto",
    gpu_layers: int | str = "auto",
    context: int = DEFAULT_CONTEXT,
    kv_type: str | None = None,
    linear: str = "auto",
    threads: int = 0,
    place: Mapping[str, str] | None = None,
    strict: bool = False,
    no_fuse: str | Sequence[str] = (),
    no_kernels: str | Sequence[str] = (),
    chat_template: str | Path | None = None,
    progress: Progress | None = None,
) -> LLM:
    """Load a model: a GGUF file, a Hugging Face directory, ``demo``, or an open file
    (`weights.random.RandomFile`, say).

    ``model_def``: a model file of your own instead of one of `graphllm.models`. ``type``: the
    format, as ``q8_0``, that matrices of floats are quantised to on the way. ``device``:
    ``auto`` (the first backend that can run each op) or one backend's name, with those behind it
    that come later in the order. ``gpu_layers``: how many layers, the last and the output first, go
    to a device with a memory of its own: ``auto`` (what fits), ``all``, or a number. ``context``:
    tokens of prompt and answer, at most the model's own. ``linear``: ``auto``, ``integer`` or
    ``float`` (activations are not quantised). ``place`` pins sites by scope pattern:
    ``{"model.layers.3.*": "cpu"}``. ``no_fuse``: fusion rules to leave out, or ``all``;
    ``no_kernels``: kernels, as ``cuda:softmax``. ``chat_template``: instead of the model's own, a
    file's or one of gemma, chatml, llama3, mistral, phi3, zephyr. ``progress``: a function of what
    is done, how much of it, and of how much. RequestError, ModelFileError, ConfigError,
    PlacementError and OutOfMemory say in a line what is wrong.
    """
    own, start = check(RULES, dict(locals())), time.perf_counter()
    options = options_from(own)
    usable, reason = (True, "") if device == "auto" else registry.find(device).available()
    if not usable:
        raise PlacementError(f"device = {device!r} cannot be used: {reason}", "device")
    file = open_model(model) if isinstance(model, (str, os.PathLike)) else model
    order = None if device == "auto" else registry.behind(device)
    executor = {
        "backends": order,
        "options": options,
        "pins": own["place"],
        "strict": own["strict"],
        "progress": progress,
    }
    decoder = decoder_for(file, model_def, type, order, options)
    limits = limits_from(own["context"], kv_type, device)
    llm = LLM(file, decoder, executor, limits, chat_template, owns_file=file is not model)
    if chat_template is not None:
        _ = llm.template  # a bad one is told now
    llm.engine.fit(own["gpu_layers"])
    llm.engine.prepare()
    llm.load_s = time.perf_counter() - start
    return llm
