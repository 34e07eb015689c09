"""Steps of loading a model: argument rules, decoder, backend options, graph limits."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import backends as registry
from .. import ops
from ..arguments import (
    Integer,
    OneOf,
    Optional,
    Rule,
    as_int,
    flag,
    function,
    invalid_argument,
    path,
    text,
    text_mapping,
    texts,
)
from ..backends import Options
from ..checkpoints.checkpoint import Checkpoint
from ..compiler import fusion
from ..engine.kv_memory import check_kv_memory, kv_blocks
from ..errors import PlacementError, RequestError
from ..graph.dtype import CACHED
from ..model.batch import Limits
from ..model.config import EncoderConfig
from ..model.decoder import Decoder
from ..runtime.executor import Executor, Progress
from ..runtime.gpu_offload import check_gpu_layers

if TYPE_CHECKING:
    from ..model.encoder import Encoder
    from ..model.spec import ModelSpec
    from ..weights import Weights

DEFAULT_CONTEXT, DEFAULT_SEQUENCES = 4096, 16
LONG_STEP = 2048  # tokens of a step on a GPU if one sequence is generated at a time
AUTO_DRAFTS, MAX_DRAFTS = 15, 63  # draft tokens of a step, if it chooses their number; at most


def _model(name: str, value: Any) -> Any:
    """Rule: a path, a model name, or an open model file."""
    if all(hasattr(value, part) for part in ("spec", "keys", "weights")):
        return value
    if isinstance(value, (str, os.PathLike)):
        return path(name, value)
    raise invalid_argument(name, value, "a path, a model name or an open model file")


def _speculate(name: str, value: Any) -> int | str:
    """Rule: "off", "auto", or a number of draft tokens, given as int or digits."""
    if value in ("off", "auto"):
        return str(value)
    if isinstance(value, str):
        number = int(value) if value.isascii() and value.isdecimal() and len(value) < 4 else None
    else:
        number = as_int(value)
    if number is None or not 0 < number <= MAX_DRAFTS:
        raise invalid_argument(name, value, f"off, auto or a number from 1 to {MAX_DRAFTS}")
    return number


def most_drafts(speculate: int | str) -> int:
    """Return the maximum number of draft tokens of a step for the argument of `load`."""
    return AUTO_DRAFTS if speculate == "auto" else 0 if speculate == "off" else int(speculate)


# Argument rules of `load`, and of other functions with the same arguments.
RULES: dict[str, Rule] = {
    "model": _model,
    "model_def": Optional(path),
    "type": Optional(text),
    "device": text,
    "gpu_layers": check_gpu_layers,
    "context": Integer(1),
    "max_sequences": Integer(1, 1024),
    "kv_memory": check_kv_memory,
    "kv_type": Optional(OneOf(CACHED)),
    "linear": OneOf(("auto", "integer", "float")),
    "deterministic": flag,
    "low_mem": flag,
    "prefill": OneOf(("auto", "fp8")),
    "speculate": _speculate,
    "draft": Optional(_model),
    "threads": Integer(0),
    "place": Optional(text_mapping),
    "strict": flag,
    "no_fuse": texts,
    "no_kernels": texts,
    "chat_template": Optional(path),
    "progress": Optional(function),
}


def model_spec(file: Checkpoint, model_def: str | Path | None = None) -> ModelSpec:
    """Return the spec of the file's model family, or of the model file ``model_def``.

    ModelFileError: unknown model family.
    """
    from .. import models

    return file.spec() if model_def is None else models.spec_of_file(model_def)


def build_decoder(
    file: Checkpoint, model_def: str | Path | None = None, kind: str | None = None,
    backends: Sequence[str] | None = None, options: Options | None = None,
) -> Decoder:  # fmt: skip
    """Build the decoder or the encoder-decoder of a model file.

    Args:
        file: the model file.
        model_def: model definition to use instead of the file's model family.
        kind: weight format to quantise float matrices to, e.g. ``q8_0``; None keeps them.
        backends: names of the backends that may quantise, in order of preference.
        options: options of these backends.

    Raises:
        ModelFileError: unknown model family.
        ConfigError: unknown configuration key.
        RequestError: the model is an encoder.
    """
    spec = model_spec(file, model_def)
    spec.check_decoder(file.path)
    found = build_model(file, spec, kind, backends, options)
    assert isinstance(found, Decoder)
    return found


def build_model(
    file: Checkpoint, spec: ModelSpec, kind: str | None = None,
    backends: Sequence[str] | None = None, options: Options | None = None, head: str = "",
) -> Decoder | Encoder:  # fmt: skip
    """Build the decoder or encoder ``spec`` of a model file; see `build_decoder`.

    ``head``: name of an encoder's head in `EncoderConfig.heads`; empty for none. RequestError if
    the family has no such head.
    """
    keys = file.keys(spec)
    config = spec.config(keys)
    keys.finish()
    if head:
        assert isinstance(config, EncoderConfig)
        if head not in config.heads:
            raise RequestError(f"{file.path}: {spec.name} has no head {head}")
        config = replace(config, head=config.heads[head])
    weights = file.weights(spec, config)
    if kind is not None:
        from ..checkpoints import quantize_on_load as on_load

        keep = on_load.kept_as_stored(config, kind)
        rotate = on_load.rotated_rows(config, kind, backends)
        weights = on_load.QuantizedWeights(weights, kind, keep, backends, options, rotate)
    build: Callable[[Any, Weights], Decoder | Encoder] = spec.model
    return build(config, weights)


def backend_options(given: Mapping[str, Any]) -> Options:
    """Return the backend `Options` for checked arguments of `load`.

    RequestError, GraphError: unknown fusion rule or kernel.
    """
    fusion.check_names(given["no_fuse"])
    _check_switches(given["no_kernels"])
    return Options(
        given["linear"], given["threads"], given["no_fuse"], given["no_kernels"],
        given["deterministic"], given["low_mem"], given["prefill"],
    )  # fmt: skip


def _check_switches(no_kernels: Sequence[str]) -> None:
    """Check the entries of ``no_kernels``.

    Raises RequestError for an entry that is not "backend:op", and for an op that plans need.
    """
    for switch in no_kernels:
        backend, colon, op = switch.partition(":")
        problem = ""
        if not colon or backend not in registry.names():
            problem = f"begin with one of {', '.join(registry.names())} and a colon"
        elif op not in ops.registry():
            problem = f"end in the name of an op, which {op!r} is not"
        elif ops.get(op).role:
            problem = f"name another op: the compiler inserts {op} where a plan needs it"
        if problem:
            raise RequestError(f"no_kernels = {switch!r} must {problem}", "no_kernels")


def check_fp8_prefill(device: str, deterministic: bool) -> None:
    """Raise PlacementError or RequestError unless prefill in FP8 fits the other options."""
    usable, reason = registry.find("cuda").available()
    if device != "cuda" and not (device == "auto" and usable):
        reason = reason if device == "auto" else f"device = {device!r}"
        what = "prefill = 'fp8' needs a GPU of CUDA, of compute capability 8.9 or newer"
        raise PlacementError(f"{what}: {reason}", "prefill")
    if deterministic:
        raise RequestError(
            "prefill = 'fp8' and deterministic = True exclude each other: a token's result would "
            "depend on the number of tokens of its step", "prefill",
        )  # fmt: skip


def executor_arguments(
    given: Mapping[str, Any], options: Options, progress: Progress | None
) -> dict[str, Any]:
    """Return the arguments of `Executor` for checked arguments of `load`.

    PlacementError: the device cannot be used.
    """
    device = given["device"]
    usable, reason = (True, "") if device == "auto" else registry.find(device).available()
    if not usable:
        raise PlacementError(f"device = {device!r} cannot be used: {reason}", "device")
    if options.prefill == "fp8":
        check_fp8_prefill(device, options.deterministic)
    return {
        "backends": None if device == "auto" else registry.fallbacks(device),
        "options": options,
        "pins": given["place"],
        "strict": given["strict"],
        "progress": progress,
    }


def graph_limits(context: int, kv_type: str | None, device: str, max_sequences: int = 1) -> Limits:
    """Return the limits of a graph; ``kv_type`` None takes the default dtype.

    A GPU prefills faster in long steps. If one sequence is generated at a time they delay no other;
    else decoding leaves at least seven eighths of a step to prompts. On the CPU long steps would
    only delay the sequences that decode.
    """
    kind = kv_type or ("f32" if device == "reference" else "f16")
    gpu = device == "cuda" or (device == "auto" and registry.find("cuda").available()[0])
    tokens = Limits.tokens
    if gpu:
        many = Limits.block * -(-8 * max_sequences // Limits.block)
        tokens = LONG_STEP if max_sequences == 1 else max(tokens, many)
    return Limits(tokens, max_sequences, context, kv_dtype=kind)


def sized_limits(
    decoder: Decoder, executor: Executor, limits: Limits, kv_memory: int | str
) -> Limits:
    """Return ``limits`` reduced to the model's, with the size of its KV pools.

    Args:
        decoder: the model.
        executor: the executor it will run on; its first device holds the KV pools.
        limits: wanted limits.
        kv_memory: see `graphllm.load`.

    Raises:
        RequestError: see `kv_blocks`; or the KV cache dtype does not fit the head size.
    """
    limits = decoder.limits(limits)
    decoder.check_cache(limits)
    left = memory_left(decoder, executor)
    return replace(limits, kv_blocks=kv_blocks(decoder.caches, limits, kv_memory, left))


def memory_left(decoder: Decoder, executor: Executor) -> int | None:
    """Return the bytes that the weights leave free on the first device; None if unknown."""
    found = [(name, decoder.weights.meta(name)) for name in decoder.weights.names()]
    metas = [(name, meta) for name, meta in found if meta is not None]
    needed = sum(meta.nbytes for _, meta in metas)
    if executor.options.prefill == "fp8":
        from ..backends.cuda.kernels.e4m3_copy import copy_nbytes

        # Of the matrices of layers; the embedding and the head have no copy.
        needed += sum(copy_nbytes(name, m) for name, m in metas if re.search(r"\.\d+\.", name))
    free = executor.devices.of(executor.backends[0]).free()
    return None if free is None else max(0, free - needed)
