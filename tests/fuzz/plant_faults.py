"""Fault injection of NaN and infinity in weights: ``plant_faults.py DEVICE EVERY [NAME ...]``.

NAME: a family, whose small model is a directory and (where llama.cpp has it) a GGUF file of floats,
or a block format, in which the matrices of a llama are stored; all of them by default. A tensor of
each kind gets one wrong value; of all such cases one out of EVERY is tried. The value must be
reported while the model is loaded or instead of a token, by one line; or transformers' logits of
the same weights are finite, but for ids that are excluded by -inf, and those of graphllm are the
same. Prints the count of each outcome so far as JSON; what is wrong is reported on standard error,
and the exit code is 1.
"""

from __future__ import annotations

import collections
import itertools
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gguf_models
import hf_models
import numpy as np
import tiny_models

import graphllm
from graphllm.checkpoints.gguf import GgufCheckpoint
from graphllm.engine.request import Sampling
from graphllm.errors import GraphllmError, ModelFileError, NumericError
from graphllm.formats import BLOCK_FORMATS, gguf_formats
from graphllm.weights.mapped_file import TensorInfo
from graphllm.weights.safetensors import Safetensors

IDS = [5, 77, 3, 19, 64, 8, 101, 42]
VALUES = (np.nan, -np.float32(np.nan), np.inf, -np.inf)
TOLERANCE = 1e-3  # of logits unaffected by infinities, relative to their range
TOKENS = 2
BLOCKS = gguf_formats()
# Sizes of tiny_models with rows of whole blocks.
WIDE = {"DIM": 256, "HEADS": 8, "KV": 2, "WIDTH": 32, "HIDDEN": 256, "LAYERS": 1}


@dataclass(frozen=True)
class Fault:
    """Replacement of the bytes at offset ``at`` of a file by ``data``; ``what`` describes it."""

    what: str
    at: int
    data: bytes


def kinds(tensors: Mapping[str, TensorInfo], rng: np.random.Generator) -> list[str]:
    """Choose one tensor among those whose names differ only in numbers."""
    found: dict[str, list[str]] = {}
    for name in tensors:
        found.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return [names[int(rng.integers(len(names)))] for names in found.values()]


def float_faults(tensors: Mapping[str, TensorInfo]) -> Iterator[Fault]:
    """Yield each non-finite value in an element of a float tensor of each kind."""
    rng = np.random.default_rng(0)
    for name in kinds(tensors, rng):
        info = tensors[name]
        size, width = info.dtype.nbytes, info.shape[-1]
        for value in VALUES:
            index = int(rng.integers(info.nbytes // size))
            if len(info.shape) == 2 and info.shape[0] > max(IDS) and "emb" in name:
                index = IDS[int(rng.integers(len(IDS)))] * width + index % width  # in use
            data = np.array([value], info.dtype.numpy).tobytes()
            yield Fault(f"{name}[{index}] = {value}", info.offset + index * size, data)


def scale_faults(tensors: Mapping[str, TensorInfo]) -> Iterator[Fault]:
    """Yield infinite and NaN scales of a block of a tensor of each kind."""
    rng = np.random.default_rng(0)
    for name in kinds(tensors, rng):
        info = tensors[name]
        form = BLOCK_FORMATS.get(info.dtype.name)
        for offset, size in form.scale_spans() if form else ():
            for bits in (0x7C00, 0xFC00, 0x7E00, 0xFFFF) if size == 2 else (0xFF,):
                block = int(rng.integers(info.nbytes // info.dtype.nbytes))
                at = info.offset + block * info.dtype.nbytes + offset
                data = bits.to_bytes(2, "little")[:size]
                yield Fault(f"{name}: block {block}, scale {bits:#x}", at, data)


class Planted:
    """Context manager that plants a fault in a file."""

    def __init__(self, path: Path, fault: Fault) -> None:
        self._path, self._fault = path, fault
        self._sound = b""

    def _write(self, data: bytes) -> bytes:
        with open(self._path, "r+b") as file:
            file.seek(self._fault.at)
            old = file.read(len(data))
            file.seek(self._fault.at)
            file.write(data)
        return old

    def __enter__(self) -> None:
        self._sound = self._write(self._fault.data)

    def __exit__(self, *_: object) -> None:
        self._write(self._sound)


def outcome(path: Path, device: str = "auto") -> tuple[str, Any]:
    """Generate two tokens.

    Returns ``load`` or ``token`` with the error, or ``none`` with the logits of the last prompt
    token.
    """
    try:
        llm = graphllm.load(path, device=device, kv_type="f32", context=64)
    except ModelFileError as error:
        return "load", error
    sampling = Sampling(temperature=0, ignore_eos=True).normalize()
    try:
        for _ in itertools.islice(llm.engine.generate(IDS, sampling, [2]), TOKENS):
            pass
    except NumericError as error:
        return "token", error
    return "none", llm.logits(IDS, last=True)


def problem(
    model: Path, fault: Fault, device: str, oracle: Callable[[], np.ndarray] | None
) -> tuple[str, str]:
    """Return the outcome of a fault in a word, and a description of the problem, if any.

    ``oracle`` computes the logits of the last prompt token; without it the fault must be reported.
    """
    file = model / "model.safetensors" if model.is_dir() else model
    with Planted(file, fault):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                kind, found = outcome(model, device)
        except (GraphllmError, Warning) as error:
            return "other", f"{type(error).__name__}: {error}"
        want = oracle() if oracle is not None and kind == "none" else None
    if kind != "none":
        text = str(found)
        named = "tensor '" in text if kind == "load" else "the first op with" in text
        return kind, "" if named and "\n" not in text and len(text) < 300 else text
    if want is None or np.isnan(found).any() or found.max() == np.inf:
        return kind, "is not reported"
    excluded = np.isneginf(found)  # -inf of a few ids is legal
    if not np.array_equal(np.isneginf(want), excluded) or not np.isfinite(want[~excluded]).all():
        return kind, f"is not reported; {np.sum(~np.isfinite(want))} logits are not finite"
    far = hf_models.distance(found[~excluded], want[~excluded])
    return kind, "" if far <= TOLERANCE else f"logits differ from transformers' by {far:.2g}"


Case = tuple[str, str, str]  # description, outcome, problem


def in_directory(family: str, device: str, folder: Path, every: int) -> Iterator[Case]:
    """Yield faults in the first small model of a family, compared with transformers."""
    from transformers import AutoModelForCausalLM

    hf_models.write(folder, hf_models.SPECS[family], 0)
    with Safetensors(folder) as file:
        tensors = dict(file.tensors)

    def oracle() -> np.ndarray:
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **plain)
        return hf_models.logits_of(model.eval(), IDS)[-1]

    for fault in itertools.islice(float_faults(tensors), 0, None, every):
        yield f"{family} {device} {fault.what}", *problem(folder, fault, device, oracle)


def in_gguf(family: str, device: str, folder: Path, every: int) -> Iterator[Case]:
    """Yield faults in the model's float32 GGUF file, whose tensors have another layout.

    Faults that are not reported are compared with the reference backend.
    """
    model = gguf_models.model_of(family, 0)
    path = gguf_models.write(folder / "m.gguf", model, gguf_models.ARCHS[family])
    with GgufCheckpoint(path) as file:
        tensors = dict(file.tensors)
    for fault in itertools.islice(float_faults(tensors), 0, None, every):
        found = problem(path, fault, device, lambda: outcome(path, "reference")[1])
        yield f"{family} gguf {device} {fault.what}", *found


def in_blocks(kind: str, device: str, folder: Path, every: int) -> Iterator[Case]:
    """Yield faults in the scales of a llama with matrices in the block format ``kind``.

    All of them must be reported at load.
    """
    with mock.patch.multiple(tiny_models, **WIDE):
        weights = tiny_models.llama_weights()
        path = tiny_models.write_llama(folder / "m.gguf", weights, kind=kind)
    with GgufCheckpoint(path) as file:
        tensors = dict(file.tensors)
    for fault in itertools.islice(scale_faults(tensors), 0, None, every):
        found, wrong = problem(path, fault, device, None)
        yield f"{kind} {device} {fault.what}", found, wrong or ("" if found == "load" else found)


def cases(name: str, device: str, every: int = 1) -> Iterator[Case]:
    """Yield one of ``every`` cases of a model family or a block format."""
    makers = [in_blocks] if name in BLOCKS else [in_directory]
    if name in gguf_models.ARCHS:
        makers.append(in_gguf)
    for make in makers:
        with tempfile.TemporaryDirectory() as folder:
            yield from make(name, device, Path(folder), every)


def main(device: str, every: int, names: Sequence[str]) -> int:
    known = [n for n, s in hf_models.SPECS.items() if n not in hf_models.ELSEWHERE and s.is_decoder]
    counts: collections.Counter[str] = collections.Counter()
    for name in names or [*known, *BLOCKS]:
        for case, found, wrong in cases(name, device, every):
            counts[found] += 1
            if wrong:
                counts["wrong"] += 1
                print(f"{case}: {wrong}", file=sys.stderr)
        print(name, json.dumps(counts), flush=True)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
