"""Write a model as a GGUF file of another type, tensor by tensor."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..atomic_file import check_output
from ..checkpoints.checkpoint import checkpoint_path
from ..checkpoints.gguf import GgufCheckpoint
from ..checkpoints.gguf_writer import GgufWriter, TensorEntry, encode_value
from ..checkpoints.model_files import check_not_input
from ..checkpoints.quantize_on_load import EXPONENT, check_finite, has_nonfinite
from ..errors import ModelFileError, RequestError, quote
from ..formats.quantization import Blocks, check_scales
from ..graph.dtype import DTYPES, DType
from .encode import Encoder
from .imatrix import ImportanceMatrix, read_imatrix
from .mixes import FileType, file_type, fitting_format, is_quantised, mixed_format
from .source import GgufSource, Source

Array = np.ndarray
Show = Callable[[str, int, int, str], None]

_QUANTISATION_VERSION = 2  # of ggml's formats, `general.quantization_version`


@dataclass
class Report:
    """What `quantize` did.

    ``notes`` are warnings, one line each; ``formats`` counts tensors by format.
    """

    path: Path
    read_bytes: int
    written_bytes: int
    seconds: float
    formats: dict[str, int]
    notes: list[str] = field(default_factory=list)


def open_source(model: str | Path) -> Source:
    """Open the model to quantise: a GGUF file, a Hugging Face directory or ``demo``."""
    path = checkpoint_path(model)
    if path.is_dir():
        from .hf_source import HfSource

        return HfSource(path)
    if path.suffix in (".safetensors", ".bin"):
        raise ModelFileError(f"{path}: give a GGUF file or a Hugging Face directory")
    return GgufSource(GgufCheckpoint(path))


def quantize(
    model: str | Path,
    output: str | Path,
    kind: str,
    *,
    formats: Mapping[str, str] | None = None,
    imatrix: str | Path | ImportanceMatrix | None = None,
    force: bool = False,
    allow_requantize: bool = False,
    threads: int = 0,
    progress: Show | None = None,
) -> Report:
    """Write ``model`` as a GGUF file of another type.

    Args:
        model: A GGUF file (the first part of a split one), a Hugging Face directory, or ``demo``.
        output: The file to write. It gets this name only when it is complete.
        kind: A type of `mixes.FILE_TYPES`.
        formats: Formats by tensors, which come before the rules of the type.
        imatrix: llama.cpp's importance matrix, or its file.
        force: Whether to replace an existing file.
        allow_requantize: Whether tensors in a block format may be converted to another one.
        threads: Number of CPU threads; 0 uses every available core.
        progress: Called with a description, the bytes read, their total, and the rate in words.

    Raises:
        RequestError: An argument is wrong, or the output exists or is one of the inputs.
        ModelFileError: A file is malformed or not supported, or a value is infinite or NaN.
        OSError: The output cannot be written.
    """
    start, path, wanted = time.perf_counter(), Path(output), file_type(kind)
    check_output(path, force)
    statistics = imatrix if isinstance(imatrix, (str, Path)) else None
    check_not_input(path, models=[model], files=[("the importance matrix", statistics)])
    source = open_source(model)
    try:
        importance = _importance(imatrix)
        plan = Plan(source, wanted, importance, allow_requantize, formats or {})
        metadata = file_metadata(source, wanted.number)
        total = sum(t.nbytes for t in source.tensors)
        with (
            Encoder(threads) as encoder,
            GgufWriter(path, metadata, plan.tensors, force) as writer,
        ):
            done = 0
            for stored, entry in zip(source.tensors, plan.tensors, strict=True):
                for part in plan.encoded(stored, entry, encoder):
                    writer.write(part)
                    done += stored.nbytes * part.nbytes // entry.nbytes
                    if progress is not None:
                        progress("quantising", done, total, rate(done, total, start))
                source.release(stored.name)
        counts = Counter(each.dtype.name for each in plan.tensors)
        size, seconds = path.stat().st_size, time.perf_counter() - start
        return Report(path, total, size, seconds, counts, [*source.notes, *plan.notes])
    finally:
        source.close()


def file_metadata(source: Source, file_type: int) -> dict[str, bytes]:
    """Return the metadata of a quantised file; ``file_type``: number of its type."""
    return {
        **source.metadata,
        "general.quantization_version": encode_value(_QUANTISATION_VERSION),
        "general.file_type": encode_value(file_type),
    }


def expert_count(entry: TensorEntry) -> int:
    """Return the number of matrices that a tensor consists of."""
    return entry.shape[0] if len(entry.shape) == 3 else 1


def _importance(imatrix: str | Path | ImportanceMatrix | None) -> dict[str, Array]:
    """Return the importance of columns by tensors."""
    if isinstance(imatrix, ImportanceMatrix):
        return imatrix.weights()
    return {} if imatrix is None else read_imatrix(Path(imatrix))


def rate(done: int, total: int, start: float) -> str:
    """Return the rate of reading since the time ``start``, and the time that the rest takes."""
    rate = max(done, 1) / (time.perf_counter() - start)
    left = round((total - done) / rate)
    return f"{rate / 1e6:.0f} MB/s, {left // 60}:{left % 60:02} left"


class Plan:
    """The tensors of the file to write.

    Attributes:
        tensors: In the order of ``source.tensors``.
        notes: A line for each matrix that gets another format than the type's rules say, and for
            matrices without importance.
    """

    def __init__(
        self,
        source: Source,
        kind: FileType,
        importance: dict[str, Array],
        allow_requantize: bool,
        formats: Mapping[str, str],
    ) -> None:
        self._source, self._importance = source, importance
        self._wider: dict[str, list[str]] = {}  # why -> matrices
        model = dataclasses.replace(source.model, importance=bool(importance))
        self.tensors = []
        for stored in source.tensors:
            dtype = stored.dtype
            if is_quantised(stored.name, stored.shape):
                name = formats.get(stored.name)
                name = name or mixed_format(kind, stored.name, stored.shape, model)
                dtype = self._fitting(stored, name)
                self._check(stored, dtype, allow_requantize)
            self.tensors.append(TensorEntry(stored.name, stored.shape, dtype))
        self.notes = [
            f"{len(names)} matrices {why}, as {names[0]}" for why, names in self._wider.items()
        ]
        self._check_importance()

    def _fitting(self, stored: TensorEntry, name: str) -> DType:
        found = fitting_format(name, stored.shape[-1])
        if found.name != name:
            block = DTYPES[name].block
            text = f"rows of {stored.shape[-1]} are not whole blocks of {block}"
            self._wider.setdefault(f"are {found}, not {name}: {text}", []).append(stored.name)
        return found

    def _check(self, stored: TensorEntry, dtype: DType, allow_requantize: bool) -> None:
        """RequestError if a quantised tensor would be quantised again."""
        if stored.dtype.quantised and stored.dtype != dtype and not allow_requantize:
            text = f"tensor {quote(stored.name)} is {stored.dtype} already"
            raise RequestError(
                f"{self._source.path}: {text}; quantising it again loses more than quantising the "
                "original model",
                "allow_requantize",
            )

    def _check_importance(self) -> None:
        """Check the sizes of the importance matrix; note which matrices it lacks."""
        if not self._importance:
            return
        missing = []
        for each in self.tensors:
            if not is_quantised(each.name, each.shape) or each.dtype.name in EXPONENT:
                continue
            found = self._importance.get(each.name)
            if found is None:
                missing.append(each.name)
            elif found.size != expert_count(each) * each.shape[-1]:
                raise ModelFileError(
                    f"importance matrix: entry {quote(each.name)} has {found.size} values for a "
                    f"tensor of shape {list(each.shape)}"
                )
        if missing and len(missing) == len(self._quantised()):
            raise ModelFileError("importance matrix: it has no entry for any tensor of the model")
        if missing:
            self.notes.append(f"no importance for {len(missing)} matrices, as {missing[0]}")

    def _quantised(self) -> list[TensorEntry]:
        every = (t for t in self.tensors if is_quantised(t.name, t.shape))
        return [t for t in every if t.dtype.name not in EXPONENT]

    def encoded(self, stored: TensorEntry, entry: TensorEntry, encoder: Encoder) -> Iterator[Array]:
        """Yield the bytes of a tensor of the file, in parts."""
        raw = self._source.raw(stored.name)
        values = Blocks(raw, stored.dtype, stored.shape[-1])
        if stored.dtype == entry.dtype:
            check_stored(stored.name, values)
            yield raw
            return
        experts = expert_count(entry)
        found = self._importance.get(entry.name)
        rows = math.prod(stored.shape[:-1]) // experts
        for expert in range(experts):
            part = values[expert * rows : (expert + 1) * rows]
            importance = None if found is None else found.reshape(experts, -1)[expert]
            yield from encoder.encode(entry.name, part, entry.dtype, importance)


def check_stored(name: str, values: Blocks) -> None:
    """ModelFileError for an infinite or NaN value of a tensor that is copied."""
    if values.dtype.name in EXPONENT:
        if has_nonfinite(values.raw, values.dtype):
            check_finite(values, name)
        return
    try:
        check_scales(values.raw, values.dtype)
    except ModelFileError as error:
        raise ModelFileError(f"tensor {quote(name)}: {error}") from None
