"""Types of files: which format each tensor gets.

A type is a format, or a mix such as q4_k_m, which stores the tensors that matter more with more
bits. Source of the rules: llama.cpp, `src/llama-quant.cpp` (`llama_tensor_get_type_impl`,
`tensor_allows_quantization`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..errors import RequestError, quote
from ..formats import BLOCK_FORMATS, ROW_FORMATS, WEIGHT_FORMATS
from ..graph.dtype import DTYPES, DType


@dataclass(frozen=True)
class FileType:
    """A type of files: GGUF's ``number`` (`general.file_type`) and the ``format`` of most tensors.

    ``mixed``: whether some tensors get another format.
    """

    name: str
    number: int
    format: str
    mixed: bool = True


_MIXES = (
    FileType("q2_k", 10, "q2_k"),
    FileType("q3_k_s", 11, "q3_k"), FileType("q3_k_m", 12, "q3_k"), FileType("q3_k_l", 13, "q3_k"),
    FileType("q4_k_s", 14, "q4_k"), FileType("q4_k_m", 15, "q4_k"),
    FileType("q5_k_s", 16, "q5_k"), FileType("q5_k_m", 17, "q5_k"),
    FileType("q6_k", 18, "q6_k"), FileType("q4_0", 2, "q4_0"), FileType("q4_1", 3, "q4_1"),
    FileType("q5_0", 8, "q5_0"), FileType("q5_1", 9, "q5_1"), FileType("q8_0", 7, "q8_0"),
    FileType("iq4_nl", 25, "iq4_nl"), FileType("iq4_xs", 30, "iq4_xs"),
    FileType("mxfp4_moe", 38, "mxfp4"),
    FileType("f32", 0, "f32", False), FileType("f16", 1, "f16", False),
    FileType("bf16", 32, "bf16", False),
)  # fmt: skip
FILE_TYPES = {each.name: each for each in _MIXES}
_OTHER_NAMES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "mxfp4": "mxfp4_moe"}
# Types that are written as a directory: compressed-tensors with one scale per output channel.
DIRECTORY_TYPES = tuple(name for name, form in ROW_FORMATS.items() if form.scaled_by_row)
# Those of them whose rounding errors depend on the largest element, so that smoothing reduces them.
SMOOTHED_TYPES = tuple(name for name in DIRECTORY_TYPES if ROW_FORMATS[name].element.kind == "i")
# The format in which the search for a mix measures each matrix. It divides most rows, and its
# errors are large enough to be measured on one chunk of text, and too small to break a model.
MEASURED = "q4_0"


def file_type(name: str) -> FileType:
    """Return the type of GGUF files of a name, in any case; RequestError lists the known ones."""
    key = name.lower()
    found = FILE_TYPES.get(_OTHER_NAMES.get(key, key))
    if found is None:
        raise RequestError(f"unknown type {quote(name)}; known: {', '.join(FILE_TYPES)}", "kind")
    return found


@dataclass(frozen=True)
class Model:
    """What the rules know of a model: ``heads_per_kv`` is the number of query heads of a KV head.

    ``names``: all tensors of the file, by GGUF's names.
    """

    architecture: str
    layers: int
    experts: int
    heads_per_kv: int
    names: frozenset[str]
    importance: bool = False

    @property
    def eight_experts(self) -> bool:
        """Whether this is a Mixtral, whose small attention matrices get more bits."""
        return self.experts == 8


# Parts of names of matrices that are too small to quantise, or too sensitive.
_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|altup|laurel|per_layer_model_proj|ssm_conv1d|"
    r"shortconv\.conv\.weight|time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\."
    r"|attn_rel_b\.weight|position_embd|token_types|indexer\.[kq]_proj\.weight"
)
_LAYER = re.compile(r"blk\.(\d+)\.")


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of the file is a matrix whose format the type decides."""
    return len(shape) in (2, 3) and name.endswith("weight") and _KEPT.search(name) is None


def _role(name: str, model: Model) -> str:
    """The part that a matrix plays: output, embedding, v, k, q, qkv, attn_output, down, other."""
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "embedding" if "output.weight" in model.names else "output"
    for part, role in (
        ("attn_qkv.weight", "qkv"), ("attn_kv_b.weight", "v"), ("attn_v.weight", "v"),
        ("attn_k.weight", "k"), ("attn_output.weight", "attn_output"), ("ffn_down", "down"),
    ):  # fmt: skip
        if part in name:
            return role
    return "other"


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else 0


def _rank(name: str, role: str, model: Model) -> tuple[int, int]:
    """Return the number of a matrix among those of its role, by layers, and how many there are."""
    if role == "down":
        if model.experts > 1:
            return _layer(name), model.layers
        return _ranks(role, model)[name], model.layers
    ranks = _ranks(role, model)
    return ranks[name], len(ranks)


@lru_cache(maxsize=4)
def _ranks(role: str, model: Model) -> dict[str, int]:
    """Return the numbers of the down projections of a model, or else of its values."""
    if role == "down":
        same = [n for n in model.names if "ffn_down" in n and n.endswith("weight")]
    else:
        same = [n for n in model.names if _role(n, model) in ("v", "qkv")]
    ordered = sorted(same, key=lambda n: (_layer(n), n))
    return {name: index for index, name in enumerate(ordered)}


def _more_bits(index: int, count: int) -> bool:
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index - eighth) % 3 == 2


def mixed_format(kind: FileType, name: str, shape: Sequence[int], model: Model) -> str:
    """Return the format of a matrix in a file of this type, before `fitting_format`.

    Args:
        kind: Type of the file.
        name: The matrix, by GGUF's name.
        shape: Outermost first.
        model: The model that it belongs to.
    """
    role = _role(name, model)
    if not kind.mixed:
        return kind.format
    if role == "output":
        wide = kind.format == "mxfp4" or shape[-1] % DTYPES[kind.format].block != 0
        wide = wide or model.architecture == "falcon" or kind.format == "q8_0"
        return "q8_0" if wide else "q6_k"
    if kind.format == "mxfp4":
        return "mxfp4" if len(shape) == 3 else "q8_0"
    if role == "embedding":
        return kind.format
    rule = {"v": _value, "qkv": _value, "k": _key, "down": _down, "attn_output": _attention_output}
    return rule[role](kind, name, model) if role in rule else kind.format


def _value(kind: FileType, name: str, model: Model) -> str:
    """Values of attention, which queries of several heads share."""
    if model.eight_experts:
        return "q8_0"
    index, count = _rank(name, "v", model)
    shared = model.heads_per_kv >= 4
    chosen: Mapping[str, str] = {
        "q2_k": "q4_k" if shared else "q3_k",
        "q3_k_m": "q5_k" if index < 2 else "q4_k",
        "q3_k_l": "q5_k",
        "q4_k_s": "q5_k" if index < 4 else kind.format,
        "q4_k_m": "q6_k" if _more_bits(index, count) else kind.format,
        "q5_k_m": "q6_k" if _more_bits(index, count) else kind.format,
        "iq4_nl": "q5_k" if shared else kind.format,
        "iq4_xs": "q5_k" if shared else kind.format,
    }
    found = chosen.get(kind.name, kind.format)
    big = model.architecture == "llama" and model.layers == 80 and model.heads_per_kv == 8
    return "q5_k" if big and found in ("q3_k", "q4_k") else found


def _key(kind: FileType, name: str, model: Model) -> str:
    return "q8_0" if model.eight_experts else kind.format


def _down(kind: FileType, name: str, model: Model) -> str:
    """Down projections of the MLP, more bits in some layers."""
    index, count = _rank(name, "down", model)
    falcon, first = model.architecture == "falcon", index < count // 8
    more, sixteenth = _more_bits(index, count), index < count // 16
    if falcon:
        chosen = {
            "q3_k_m": "q5_k" if sixteenth else "q4_k" if more else "q3_k",
            "q3_k_l": "q4_k",
            "q4_k_m": "q6_k" if sixteenth else "q5_k" if more else kind.format,
            "q4_k_s": kind.format,
        }
    else:
        chosen = {
            "q3_k_m": "q5_k" if sixteenth else "q4_k",
            "q3_k_l": "q5_k",
            "q4_k_m": "q6_k" if more else kind.format,
            "q4_k_s": "q5_k" if first else kind.format,
        }
    chosen |= {
        "q2_k": "q3_k",
        "q5_k_m": "q6_k" if more else kind.format,
        "q4_0": "q4_1" if first and model.importance else kind.format,
        "q5_0": "q5_1" if first and model.importance else kind.format,
        "iq4_nl": "q5_k" if first and not model.importance else kind.format,
        "iq4_xs": "q5_k" if first and not model.importance else kind.format,
    }
    return chosen.get(kind.name, kind.format)


def _attention_output(kind: FileType, name: str, model: Model) -> str:
    if model.architecture == "falcon":
        return "q4_k" if kind.name == "q3_k_l" else kind.format
    if model.eight_experts:
        few = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs")
        return "q5_k" if kind.name in few else kind.format
    chosen = {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}
    return chosen.get(kind.name, kind.format)


def ladder(columns: int) -> list[DType]:
    """Return the block formats of files whose blocks divide rows of ``columns`` elements.

    mxfp4 is left out: it is the format of weights that were trained in it.
    """
    names = dict.fromkeys(each.format for each in _MIXES if each.mixed and each.format != "mxfp4")
    return [WEIGHT_FORMATS[n] for n in names if columns % WEIGHT_FORMATS[n].block == 0]


def fitting_format(name: str, columns: int) -> DType:
    """Return the format of rows of ``columns`` elements: ``name``, its fallback if the rows are not
    whole blocks, or f16."""
    form = BLOCK_FORMATS.get(name)
    for each in (name, form.fallback if form else None):
        if each and columns % WEIGHT_FORMATS[each].block == 0:
            return WEIGHT_FORMATS[each]
    return WEIGHT_FORMATS["f16"]
