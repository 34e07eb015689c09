"""Write a Hugging Face directory with W8A8 or FP8 weights, as compressed-tensors stores them.

Each linear becomes ``weight`` [N, K], int8 or e4m3, and ``weight_scale`` [N, 1], float32; see
`graphllm.checkpoints.published.compressed_tensors`, which reads them. Embedding, output head and
routers stay as stored, and so does every tensor that is no linear's. Elements and scales are those
of quantisation on load.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic_file import AtomicDirectory, check_output_directory
from ..checkpoints.checkpoint import checkpoint_path
from ..checkpoints.hf_directory import HfCheckpoint
from ..checkpoints.quantize_on_load import kept_as_stored
from ..checkpoints.safetensors_writer import SafetensorsEntry, SafetensorsWriter
from ..errors import ModelFileError, RequestError, quote
from ..formats import ROW_FORMATS, RowFormat
from ..formats.quantization import Blocks, dequantise
from ..graph.dtype import DTYPES, F32
from ..model.batch import Batch, Limits
from ..model.decoder import Decoder, DecoderConfig
from ..weights import NamedWeights
from ..weights.mapped_file import TensorInfo
from ..weights.safetensors_format import F8_E4M3, READABLE
from .driver import Report, Show, check_stored, rate
from .encode import Encoder
from .linear_sites import linear_sites
from .mixes import DIRECTORY_TYPES
from .smoothing import ChannelStatistics, Fold, Smoothing, find_folds, smooth

_FLOATS = ("f32", "f16", "bf16")
# Files of a model directory that hold neither weights nor code.
_COPIED = (".json", ".jinja", ".model", ".spm", ".tiktoken", ".txt", ".md")
_TEMPLATES = "additional_chat_templates"
_WEIGHTS = "model.safetensors"
_SLAB_BYTES = 64 << 20  # of a smoothed matrix at a time

Array = np.ndarray


def quantize_directory(
    model: str | Path,
    output: str | Path,
    kind: str,
    *,
    inputs: Mapping[str, ChannelStatistics] | None = None,
    force: bool = False,
    threads: int = 0,
    progress: Show | None = None,
) -> Report:
    """Write ``model`` as a compressed-tensors directory.

    Args:
        model: A Hugging Face directory of a decoder, with weights in floats.
        output: The directory to write. It gets this name only when it is complete.
        kind: A type of `mixes.DIRECTORY_TYPES`: int8 (w8a8) or e4m3 (fp8) weights and activations,
            with scales per output channel and per token.
        inputs: Statistics of the inputs of linears by canonical names of their weights, for
            SmoothQuant; see `smoothing`. None for none.
        force: Whether to replace an existing directory, which must be one of a model.
        threads: Number of CPU threads; 0 uses every available core.
        progress: Called with a description, the bytes read, their total, and the rate in words.

    Raises:
        RequestError: An argument is wrong, or the output exists.
        ModelFileError: A file is malformed or not supported, or a value is infinite or NaN.
        OSError: The output cannot be written.
    """
    start, folder, output = time.perf_counter(), checkpoint_path(model), Path(output)
    show = progress or (lambda what, done, total, text: None)
    check_paths(folder, output, force)
    source = _Source(folder, _row_format(kind))
    try:
        if inputs is not None:
            source.smooth(inputs, show)
        total, done = sum(info.nbytes for info in source.tensors.values()), 0
        with (
            Encoder(threads) as encoder,
            AtomicDirectory(output, force) as made,
            SafetensorsWriter(made / _WEIGHTS, list(source.entries())) as writer,
        ):
            _write_json(made / "config.json", source.config())
            _copy_files(folder, made)
            for info in source.tensors.values():
                for part in source.encoded(info, encoder):
                    writer.write(part)
                    show("quantising", done, total, rate(done, total, start))
                done += info.nbytes
                source.release(info.name)
        size = sum(each.stat().st_size for each in output.rglob("*") if each.is_file())
        counts = Counter(source.stored_dtype(info) for info in source.tensors.values())
        return Report(
            output, total, size, time.perf_counter() - start, counts, list(source.notes())
        )
    finally:
        source.close()


def check_paths(folder: Path, output: Path, force: bool) -> None:
    """Raise RequestError unless ``output`` may be written, or replaced, from ``folder``."""
    if not folder.is_dir():
        raise RequestError(f"{folder}: is no Hugging Face directory, which this type needs")
    if output.suffix in (".gguf", ".safetensors"):
        raise RequestError(f"{output}: this type is written as a directory, not as a file")
    check_output_directory(output, force)
    if folder.resolve().is_relative_to(output.resolve()):
        raise RequestError(f"{output}: contains the model to quantise")
    if output.exists() and not (
        (output / "config.json").is_file() and any(output.glob("*.safetensors"))
    ):
        raise RequestError(f"{output}: is not the directory of a model, so it is not replaced")


def _row_format(kind: str) -> RowFormat:
    """Return the format of a type of directories; RequestError lists the known ones."""
    if kind not in DIRECTORY_TYPES:
        known = ", ".join(DIRECTORY_TYPES)
        raise RequestError(f"unknown type {quote(kind)} of directories; known: {known}", "kind")
    return ROW_FORMATS[kind]


class _Source:
    """The tensors of a directory, those of linears in the row format ``form``.

    Attributes:
        tensors: The directory's tensors by name, in the order of its files.
    """

    def __init__(self, folder: Path, form: RowFormat) -> None:
        self._form = form
        self._file = HfCheckpoint(folder)
        self.tensors = {name: self._file.file.readable(name) for name in self._file.tensors}
        if self._file.metadata.get("quantization_config") is not None:
            raise RequestError(f"{folder / 'config.json'}: the model is quantised already")
        spec = self._file.spec()
        spec.check_decoder(folder)
        config = spec.config(self._file.keys(spec))
        assert isinstance(config, DecoderConfig) and issubclass(spec.model, Decoder)
        weights = self._file.weights(spec, config)
        assert isinstance(weights, NamedWeights)
        decoder = spec.model(config, weights)
        hidden = decoder.build(Batch(decoder.caches, Limits(context=64, kv_dtype="f32")))["hidden"]
        self._hidden, self._weights, self._keep = hidden, weights, kept_as_stored(config, form.name)
        self._quantised: set[str] = set()  # stored names
        self._smoothing, self._canonical = Smoothing(), dict[str, str]()  # stored -> canonical
        self._ignored = {config.names.head: None}  # modules, in order
        self._reasons = Counter[str]()
        for name in dict.fromkeys(site.weight for site in linear_sites(hidden)):
            self._place(name)
        if not self._quantised:
            raise ModelFileError(f"{folder}: no linear can be quantised: {self._reason()}")

    def _place(self, name: str) -> None:
        """Find out whether the tensors of a weight are quantised."""
        stored = self._weights.row_sources(name)
        reason = None if self._keep(name) else self._obstacle(stored)
        if reason is None and not self._keep(name):
            self._quantised.update(stored)
            return
        every = self._weights.sources(name)
        self._ignored |= {each.removesuffix(".weight"): None for each in every}
        if reason is not None:
            self._reasons[reason] += 1

    def _obstacle(self, stored: list[str]) -> str | None:
        """Return why the tensors of a weight cannot be quantised; None if they can."""
        infos = [self.tensors[name] for name in stored]
        if not infos:
            return "their rows are not stored as rows"
        if any(len(t.shape) != 2 or not t.name.endswith(".weight") for t in infos):
            return "they are not stored as matrices of linears"
        if any(t.dtype.name not in _FLOATS for t in infos):
            return "they are not stored as floats"
        block = self._form.dtype.block
        if any(t.shape[1] % block for t in infos):
            return f"their rows are not whole blocks of {block}"
        return None

    # -- smoothing
    def smooth(self, inputs: Mapping[str, ChannelStatistics], show: Show) -> None:
        """Scale the channels of all inputs that can be; see `smoothing`."""
        folds = [fold for fold in find_folds(self._hidden) if self._can_scale(fold)]
        self._smoothing = smooth(
            folds, self._matrix, inputs, lambda done, total: show("smoothing", done, total, "")
        )
        for name in (*self._smoothing.columns, *self._smoothing.rows):
            self._canonical[self._stored_as(name)[0]] = name

    def _stored_as(self, name: str) -> tuple[str, float]:
        found = self._weights.stored_as(name)
        assert found is not None
        return found

    def _can_scale(self, fold: Fold) -> bool:
        """Whether all weights of a fold are written: vectors of floats, and quantised matrices."""
        for name in (*fold.matrices, *fold.producers):
            stored = self._weights.stored_as(name)
            if stored is None:
                return False
            info = self.tensors[stored[0]]
            if len(info.shape) > 1 and info.name not in self._quantised:
                return False
        return True

    def _matrix(self, name: str) -> Blocks:
        info = self.tensors[self._stored_as(name)[0]]
        return Blocks(self._file.file.raw(info.name), info.dtype, info.shape[1])

    def _scaled_vector(self, info: TensorInfo) -> Array:
        """Return a norm weight or a bias as float32, divided by the factors."""
        name = self._canonical[info.name]
        offset = np.float32(self._stored_as(name)[1])
        stored = dequantise(self._file.file.raw(info.name), info.dtype).reshape(-1)
        return (stored + offset) / self._smoothing.rows[name] - offset

    def _scaled_matrix(self, values: Blocks, name: str) -> Iterator[Blocks]:
        """Yield a matrix with its factors applied, some rows at a time."""
        for first, tile in values.tiles(_SLAB_BYTES):
            made = np.ascontiguousarray(self._smoothing.apply(name, tile, first))
            yield Blocks(made.view(np.uint8), F32, values.elements)

    # -- tensors
    def _reason(self) -> str:
        return "; ".join(self._reasons)

    def notes(self) -> Iterator[str]:
        """Yield a line for each reason why linears stay as stored."""
        for reason, count in self._reasons.items():
            yield f"{count} matrices are as stored, not {self._form.name}: {reason}"

    def stored_dtype(self, info: TensorInfo) -> str:
        """Return the format that a tensor gets."""
        return self._form.name if info.name in self._quantised else info.dtype.name

    def entries(self) -> Iterator[SafetensorsEntry]:
        """Yield the tensors of the file to write, in order."""
        element = F8_E4M3 if self._form.element == F8_E4M3.numpy else READABLE["I8"]
        for info in self.tensors.values():
            if info.name in self._quantised:
                yield SafetensorsEntry(info.name, info.shape, element)
                yield SafetensorsEntry(f"{info.name}_scale", (info.shape[0], 1), F32)
            else:
                scaled = info.name in self._canonical  # in full precision, once it is computed
                yield SafetensorsEntry(info.name, info.shape, F32 if scaled else info.dtype)

    def encoded(self, info: TensorInfo, encoder: Encoder) -> Iterator[Array]:
        """Yield the bytes of a tensor and of its scales, in parts."""
        raw = self._file.file.raw(info.name)
        if info.name not in self._quantised:
            if info.shape and info.dtype.name in _FLOATS:
                check_stored(info.name, Blocks(raw, info.dtype, info.shape[-1]))
            yield self._scaled_vector(info) if info.name in self._canonical else raw
            return
        values, scales = Blocks(raw, info.dtype, info.shape[1]), []
        name = self._canonical.get(info.name)
        for part in [values] if name is None else self._scaled_matrix(values, name):
            for rows in encoder.encode(info.name, part, DTYPES[self._form.name], None):
                q, d = self._form.split(rows)
                scales.append(np.where(d > 0, d, np.float32(1)))  # 1 for a row of zeros
                yield q.view(np.uint8)
        yield np.concatenate(scales)

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        stated = quantization_config(self._form.name, list(self._ignored))
        return {**self._file.metadata, "quantization_config": stated}

    def release(self, name: str) -> None:
        self._file.file.release(name)

    def close(self) -> None:
        self._file.close()


def quantization_config(kind: str, ignored: list[str]) -> dict[str, Any]:
    """Return compressed-tensors' configuration of linears in the format ``kind``.

    ``ignored``: paths of the linears that are not quantised.
    """
    element = "int" if ROW_FORMATS[kind].element == np.int8 else "float"
    common = {"num_bits": 8, "type": element, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": f"{element}-quantized",
        "quantization_status": "compressed", "config_groups": {"group_0": group},
        "ignore": ignored, "kv_cache_scheme": None,
    }  # fmt: skip


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def _copy_files(folder: Path, made: Path) -> None:
    """Copy the files of the tokenizer, the templates and the description of the model."""
    for path in sorted(folder.iterdir()):
        named = path.suffix in _COPIED or path.name.startswith("LICENSE")
        written = path.name == "config.json" or path.name.endswith(".index.json")
        if named and not written and path.is_file():
            shutil.copyfile(path, made / path.name)
    templates = folder / _TEMPLATES
    if templates.is_dir():
        (made / _TEMPLATES).mkdir()
        for path in sorted(templates.glob("*.jinja")):
            shutil.copyfile(path, made / _TEMPLATES / path.name)


__all__ = ["check_paths", "quantization_config", "quantize_directory"]
