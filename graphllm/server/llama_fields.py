"""Fields of the endpoints of llama.cpp's server."""

from __future__ import annotations

from typing import Any

from ..arguments import Integer, OneOf, flag, mapping, token_ids
from .chat_parts import as_object, malformed, string
from .fields import COMMON, COUNT, Field, Unsupported, any_text, messages_field, prompts_field
from .json_shapes import STRING, accepts, array, fields, shape_of
from .reasoning import EFFORTS
from .tools import tool_choice_field, tools_field


@accepts(shape_of(Integer(-1, 2**32 - 1)))
def _seed(name: str, value: Any) -> int | None:
    """A seed; -1 chooses one."""
    found = Integer(-1, 2**32 - 1)(name, value)
    return None if found in (-1, 2**32 - 1) else found


@accepts(array(fields("text", text=STRING, filename=STRING), 0))
def _files(name: str, value: Any) -> list[tuple[str, str]]:
    """Names and texts of files."""
    if not isinstance(value, list):
        raise malformed(name, "a list of files")
    found = []
    for index, each in enumerate(value):
        where = f"{name}[{index}]"
        file = as_object(where, each)
        text, own = file.get("text"), file.get("filename", "tmp")
        found.append((string(f"{where}.filename", own), string(f"{where}.text", text)))
    return found


NATIVE = COMMON | {
    "prompt": Field(prompts_field),
    "n_predict": Field(Integer(-1, COUNT), "max_tokens"),
    "max_tokens": Field(Integer(-1, COUNT), "max_tokens"),
    "repeat_last_n": Field(Integer(-1, COUNT), "penalty_last_n"),
    "seed": Field(_seed, "seed"),
    "json_schema": Field(mapping, "json_schema"),
    "return_tokens": Field(flag),
    "cache_prompt": Field(flag),  # whether it is cached changes no answer
    "n": Field(Unsupported((1,))),
    "n_probs": Field(Unsupported((0,))),
    "lora": Field(Unsupported(([],))),
    "samplers": Field(Unsupported()),
    "mirostat": Field(Unsupported((0,))),
    "xtc_probability": Field(Unsupported((0,))),
    "dry_multiplier": Field(Unsupported((0,))),  # without it, other fields of DRY have no effect
    "dynatemp_range": Field(Unsupported((0,))),
    "top_n_sigma": Field(Unsupported((0, -1))),
    "t_max_predict_ms": Field(Unsupported((0, -1))),
}  # fmt: skip
INFILL = NATIVE | {
    "input_prefix": Field(any_text),
    "input_suffix": Field(any_text),
    "input_extra": Field(_files),
    "prompt": Field(any_text),
}
TOKENIZE = {
    "content": Field(any_text),
    "add_special": Field(flag),
    "parse_special": Field(flag),
    "with_pieces": Field(flag),
}
DETOKENIZE = {"tokens": Field(token_ids)}
APPLY_TEMPLATE = {
    "messages": Field(messages_field),
    "tools": Field(tools_field),
    "tool_choice": Field(tool_choice_field),
    "reasoning_effort": Field(OneOf(EFFORTS)),
    "add_generation_prompt": Field(flag),
}
