"""Attribution of a quantised model's divergence to its tensors.

Each tensor that the quantised model stores in fewer bytes is put into the base model by itself, and
the KL divergence from the base is measured. Divergences of single tensors do not add up exactly to
that of the whole model, but their order tells where bytes are best spent.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..arguments import Integer, Optional, Rule, check
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.mixed_weights import mixed_checkpoint
from ..errors import RequestError, quote
from ..graph.tensor import Meta
from ..loading.loaded_model import LoadedModel
from .base_file import BaseFile
from .divergence_report import Divergence
from .kl_divergence import compare_with_base, save_base
from .perplexity import MIN_CONTEXT, split_text, standard_error

# Called with the number of tensors done, of all tensors, and the name of the next one.
TensorProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TensorCost:
    """What quantising one tensor costs and saves.

    Attributes:
        name: canonical name of the tensor.
        base_type, type: formats in the base model and in the quantised one.
        saved_bytes: bytes that the quantised format saves.
        mean_kld: mean KL divergence of the base model with this tensor quantised from the base.
        standard_error: standard error of ``mean_kld``.
    """

    name: str
    base_type: str
    type: str
    saved_bytes: int
    mean_kld: float
    standard_error: float

    @property
    def kld_per_mb(self) -> float:
        """Mean KL divergence per saved MB."""
        return self.mean_kld / (self.saved_bytes / 1e6)


@dataclass(frozen=True)
class Attribution:
    """Costs of the tensors, those with the largest divergence per saved byte first.

    Attributes:
        mean_kld: mean KL divergence of the whole quantised model from the base.
        saved_bytes: bytes that it saves.
        tensors: each tensor's cost.
    """

    mean_kld: float
    saved_bytes: int
    tensors: tuple[TensorCost, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``graphllm attribute --json`` prints."""
        tensors = [{**asdict(each), "kld_per_mb": each.kld_per_mb} for each in self.tensors]
        return {"mean_kld": self.mean_kld, "saved_bytes": self.saved_bytes, "tensors": tensors}

    def table(self) -> str:
        """Return a line for each tensor."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"quantised: mean KLD {self.mean_kld:.6f}, saves {self.saved_bytes / 1e6:.2f} MB"
        yield f"{'KLD per MB':>12} {'mean KLD':>10} {'':>11} {'MB saved':>9}  tensor"
        for each in self.tensors:
            yield (
                f"{each.kld_per_mb:>12.3e} {each.mean_kld:>10.6f} ± {each.standard_error:.6f} "
                f"{each.saved_bytes / 1e6:>9.2f}  {each.name} ({each.base_type} -> {each.type})"
            )


def attribute(
    base: Checkpoint, quantised: Checkpoint, text: str | Sequence[int],
    context: int, chunks: int | None = None, pattern: str = "*",
    options: Mapping[str, Any] | None = None,
    progress: TensorProgress = lambda done, total, name: None,
) -> Attribution:  # fmt: skip
    """Rank the tensors of a quantised model by what each costs. Models are loaded one at a time.

    Args:
        base: the base model.
        quantised: the same model, quantised.
        text: text to measure the divergence on, or token ids.
        context, chunks: see `split_text`.
        pattern: pattern of the names of tensors to measure.
        options: keyword arguments of `LoadedModel.load`.
        progress: called before each tensor.

    Raises:
        RequestError: invalid text; the models have different shapes; no tensor is smaller.
    """
    rules: dict[str, Rule] = {"context": Integer(MIN_CONTEXT), "chunks": Optional(Integer(1))}
    check(rules, {"context": context, "chunks": chunks})
    given = {**(options or {}), "context": context}
    with tempfile.TemporaryDirectory(prefix="graphllm-") as folder:
        path = Path(folder) / "base"
        with LoadedModel.load(base, **given) as llm:
            save_base(llm, split_text(llm, text, context, chunks), path)
            before = _metas(llm)

        def measure(model: Checkpoint) -> tuple[Divergence, dict[str, Meta]]:
            with LoadedModel.load(model, **given) as llm, BaseFile(path) as file:
                metas = _metas(llm)
                _check_shapes(before, metas)
                return compare_with_base(llm, file), metas

        whole, after = measure(quantised)
        saved = {name: before[name].nbytes - after[name].nbytes for name in before}
        saved = {name: count for name, count in saved.items() if count > 0}
        names = [name for name in saved if fnmatchcase(name, pattern)]
        if not names:
            raise RequestError(f"no tensor that matches {quote(pattern)} has fewer bytes")
        found = []
        for done, name in enumerate(names):
            progress(done, len(names), name)
            own, _ = measure(mixed_checkpoint(base, quantised, {name}))
            types = str(before[name].dtype), str(after[name].dtype)
            error = standard_error(own.kld)
            found.append(TensorCost(name, *types, saved[name], own.mean_kld, error))
    found.sort(key=lambda each: -each.kld_per_mb)
    return Attribution(whole.mean_kld, sum(saved.values()), tuple(found))


def _metas(llm: LoadedModel) -> dict[str, Meta]:
    """Return shapes and dtypes of a model's weights."""
    weights = llm.decoder.weights
    found = {name: weights.meta(name) for name in weights.names()}
    return {name: meta for name, meta in found.items() if meta is not None}


def _check_shapes(base: Mapping[str, Meta], other: Mapping[str, Meta]) -> None:
    """Raise RequestError if a weight of the base model has another shape in the other one."""
    for name, meta in base.items():
        found = other.get(name)
        if found is None or found.shape != meta.shape:
            raise RequestError(
                f"the models differ: {quote(name)} is {meta} in the base and {found} in the other"
            )
