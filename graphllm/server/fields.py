"""Fields of requests by endpoint: their types and ranges, and the sampling settings they become.

A field that is null counts as absent. Fields that are not listed are ignored, as OpenAI does. Those
that are listed as `Unsupported` are refused, since ignoring them would change the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..arguments import (
    Integer,
    OneOf,
    Real,
    Rule,
    flag,
    invalid_argument,
    mapping,
    text,
    texts,
    token_biases,
    token_ids,
)
from ..model.batch import Limits
from .errors import ApiError
from .json_shapes import OBJECT, STRING, Shape, accepts, array, one_of, shape_of
from .reasoning import EFFORTS
from .structured_fields import (
    VLLM_FORMATS,
    Constraint,
    grammar_field,
    guided_choice,
    guided_grammar,
    guided_json,
    structured_outputs,
)
from .template_variables import template_variables
from .tools import response_format_field, tool_choice_field, tools_field

MAX_CHOICES = 128  # of a request: prompts times n, as OpenAI limits n
MAX_STOPS, MAX_STOP_CHARS = 16, 1024  # stop strings of a request, and characters of each
MAX_BIASES = 1024  # entries of logit_bias
MAX_STOP_IDS = 1024
COUNT = 2**31 - 1
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_IDS = array({"type": "integer", "minimum": 0})
TOP_LOGPROBS = 20  # most likely tokens of a position


@dataclass(frozen=True)
class Field:
    """A field of a request.

    Attributes:
        rule: checks the value and converts it.
        setting: field of `Sampling` that gets the value; None if the endpoint reads it.
    """

    rule: Rule
    setting: str | None = None


@dataclass(frozen=True)
class Unsupported:
    """A field that is accepted only with a value that asks for nothing; see `Field.rule`."""

    off: tuple[Any, ...] = ()

    @property
    def shape(self) -> Shape:
        """JSON schema of the accepted values; null, which counts as absent, is one."""
        return {"enum": [None, *self.off]}

    def __call__(self, name: str, value: Any) -> Any:
        bool_or_not = [off for off in self.off if isinstance(off, bool) == isinstance(value, bool)]
        if value in bool_or_not:  # 0 == False in Python, but not in JSON
            return value
        raise ApiError(400, f"{name} is not supported by this server", name, "unsupported_value")


@accepts(STRING)
def any_text(name: str, value: Any) -> str:
    """A string, also an empty one."""
    if not isinstance(value, str):
        raise invalid_argument(name, value, "a string")
    return value


@accepts(shape_of(Real(0, 1)))
def top_p_field(name: str, value: Any) -> float:
    """A number from 0 to 1; OpenAI's 0 keeps the most likely token only."""
    return max(Real(0, 1)(name, value), 1e-9)


@accepts(shape_of(Integer(-(2**63), 2**63 - 1)))
def _seed(name: str, value: Any) -> int:
    """Any integer of 64 bits, as one that is not negative."""
    return Integer(-(2**63), 2**63 - 1)(name, value) % 2**63


@accepts(one_of(_STOP, array(_STOP, 0, MAX_STOPS)))
def stop_field(name: str, value: Any) -> tuple[str, ...]:
    """A stop string, or several."""
    if isinstance(value, list) and len(value) > MAX_STOPS:
        raise invalid_argument(name, value, f"at most {MAX_STOPS} strings")
    found = texts(name, value)
    if any(len(each) > MAX_STOP_CHARS for each in found):
        raise invalid_argument(name, value, f"strings of at most {MAX_STOP_CHARS} characters")
    return found


def token_ids_up_to(most: int) -> Rule:
    """Return the rule of a list of at most ``most`` token ids."""

    @accepts(array({"type": "integer", "minimum": 0}, 0, most))
    def rule(name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, list) and len(value) > most:
            raise invalid_argument(name, value, f"at most {most:,} token ids")
        return token_ids(name, value)

    return rule


@accepts({"type": "object", "maxProperties": MAX_BIASES,
          "additionalProperties": shape_of(Real(-100, 100))})  # fmt: skip
def _logit_bias(name: str, value: Any) -> dict[int, float]:
    """An object of biases from -100 to 100 by token id, a JSON key."""
    found = mapping(name, value)
    if len(found) > MAX_BIASES:
        raise invalid_argument(name, value, f"an object of at most {MAX_BIASES} token ids")
    numbers = [key.isascii() and key.isdigit() and len(key) < 10 for key in found]
    biases = token_biases(name, {int(key): bias for key, bias in found.items() if all(numbers)})
    if not all(numbers) or not all(-100 <= bias <= 100 for bias in biases.values()):
        raise invalid_argument(name, value, "an object of biases in [-100, 100] by token id")
    return biases


@accepts(array(OBJECT))
def messages_field(name: str, value: Any) -> list[Any]:
    """A list; the chat template checks the messages."""
    if not isinstance(value, list) or not value:
        raise invalid_argument(name, value, "a list of messages")
    return value


@accepts(one_of(STRING, _IDS, array(STRING, 1, MAX_CHOICES), array(_IDS, 1, MAX_CHOICES)))
def prompts_field(name: str, value: Any) -> list[str | list[int]]:
    """Prompts of ``/v1/completions``: a string, token ids, or a list of either."""
    several = isinstance(value, list) and value and isinstance(value[0], (str, list))
    prompts = value if several else [value]
    if len(prompts) > MAX_CHOICES:
        raise invalid_argument(name, value, f"at most {MAX_CHOICES} prompts")
    return [p if isinstance(p, str) else list(_some_ids(name, p)) for p in prompts]


def _some_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise invalid_argument(name, value, "a string, token ids, or a list of either")
    return token_ids(name, value)


@accepts(OBJECT)
def _stream_options(name: str, value: Any) -> bool:
    """The object with ``include_usage``."""
    given = mapping(name, value).get("include_usage")
    return given is not None and flag(f"{name}.include_usage", given)


@accepts(shape_of(Real(-1)))
def _sigmas(name: str, value: Any) -> float:
    """A number of standard deviations; -1 stands for 0."""
    return max(0.0, Real(-1)(name, value))


@accepts(array({"type": "integer", "minimum": 0}, 1, Limits.allowed))
def _allowed_ids(name: str, value: Any) -> tuple[int, ...]:
    """The only token ids that may be sampled, at least one."""
    found = token_ids(name, value)
    if not 1 <= len(found) <= Limits.allowed:
        raise invalid_argument(name, value, f"a list of 1 to {Limits.allowed} token ids")
    return found


# Samplers of llama.cpp, in its default order, which is that of `Sampling`.
_ORDER = [
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
]  # fmt: skip
_REPEAT_PENALTY = Field(Real(0.01, 100), "repeat_penalty")
# Not in the APIs, with the names of vLLM and llama.cpp.
BEYOND = {
    "min_p": Field(Real(0, 1), "min_p"),
    "typical_p": Field(Real(0, 1, above=True), "typical_p"),
    "repetition_penalty": _REPEAT_PENALTY,
    "repeat_penalty": _REPEAT_PENALTY,
    "min_tokens": Field(Integer(0, COUNT), "min_tokens"),
    "ignore_eos": Field(flag, "ignore_eos"),
    "stop_token_ids": Field(token_ids_up_to(MAX_STOP_IDS), "stop_ids"),
    "x_profile": Field(flag, "profile"),
    "json_schema": Field(mapping, "json_schema"),
    "grammar": Field(grammar_field, "grammar"),
    # Of llama.cpp's server.
    "repeat_last_n": Field(Integer(-1, COUNT), "penalty_last_n"),
    "top_n_sigma": Field(_sigmas, "top_n_sigma"),
    "xtc_probability": Field(Real(0, 1), "xtc_probability"),
    "xtc_threshold": Field(Real(0, 1), "xtc_threshold"),
    "samplers": Field(Unsupported(([], _ORDER))),
    "mirostat": Field(Unsupported((0,))),
    "adaptive_target": Field(Unsupported((-1,))),
    "dry_multiplier": Field(Unsupported((0,))),  # without it, other fields of DRY have no effect
    "dynatemp_range": Field(Unsupported((0,))),
    "t_max_predict_ms": Field(Unsupported((0, -1))),
    "lora": Field(Unsupported(([],))),
    # Of vLLM.
    "allowed_token_ids": Field(_allowed_ids, "allowed_ids"),
    "bad_words": Field(Unsupported(([],))),
    "use_beam_search": Field(Unsupported((False,))),
    "truncate_prompt_tokens": Field(Unsupported()),
    "include_stop_str_in_output": Field(Unsupported((False,))),
    **{name: Field(Unsupported()) for name in VLLM_FORMATS},
}
SEED, TOP_K = Field(_seed, "seed"), Field(Integer(0, COUNT), "top_k")

COMMON = BEYOND | {
    "structured_outputs": Field(structured_outputs),
    "guided_json": Field(guided_json, "json_schema"),
    "guided_regex": Field(text, "regex"),
    "guided_choice": Field(guided_choice, "grammar"),
    "guided_grammar": Field(guided_grammar, "grammar"),
    "model": Field(any_text),
    "stream": Field(flag),
    "stream_options": Field(_stream_options),
    "n": Field(Integer(1, MAX_CHOICES), "n"),
    "seed": SEED,
    "stop": Field(stop_field, "stop"),
    "temperature": Field(Real(0, 2), "temperature"),
    "top_p": Field(top_p_field, "top_p"),
    "top_k": TOP_K,
    "presence_penalty": Field(Real(-2, 2), "presence_penalty"),
    "frequency_penalty": Field(Real(-2, 2), "frequency_penalty"),
    "logit_bias": Field(_logit_bias, "logit_bias"),
    "response_format": Field(response_format_field, "json_schema"),
}

# Variables of the chat template, with the names of vLLM and llama.cpp.
TEMPLATE = {
    "chat_template_kwargs": Field(template_variables),
    "chat_template": Field(Unsupported()),
}
CHAT = COMMON | TEMPLATE | {
    "add_generation_prompt": Field(Unsupported((True,))),
    "continue_final_message": Field(Unsupported((False,))),
    "source_lang": Field(Unsupported()),
    "target_lang": Field(Unsupported()),
    "messages": Field(messages_field),
    "max_tokens": Field(Integer(1, COUNT), "max_tokens"),
    "max_completion_tokens": Field(Integer(1, COUNT), "max_tokens"),
    "logprobs": Field(flag),
    "top_logprobs": Field(Integer(0, TOP_LOGPROBS)),
    "reasoning_effort": Field(OneOf(EFFORTS)),
    "tools": Field(tools_field),
    "tool_choice": Field(tool_choice_field),
    "parallel_tool_calls": Field(flag),
    "verbose": Field(flag),
    "functions": Field(Unsupported(([],))),
    "function_call": Field(Unsupported(("none", "auto"))),
    "modalities": Field(Unsupported((["text"],))),
    "audio": Field(Unsupported()),
}  # fmt: skip

COMPLETION = COMMON | {
    "prompt": Field(prompts_field),
    "max_tokens": Field(Integer(0, COUNT), "max_tokens"),
    "logprobs": Field(Integer(0, TOP_LOGPROBS), "logprobs"),
    "echo": Field(flag),
    "source_lang": Field(text, "source_lang"),  # of encoder-decoders
    "target_lang": Field(text, "target_lang"),
    "suffix": Field(any_text),
    "best_of": Field(Unsupported((1,))),
}


def check_fields(table: Mapping[str, Field], body: Any, *required: str) -> dict[str, Any]:
    """Return the values of the fields that a request has.

    Args:
        table: fields of the endpoint.
        body: the JSON value that the client sent.
        *required: fields that must be present.

    Raises:
        RequestError, ApiError: the body is no object, or a field is invalid, missing or refused.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    given = {name: body[name] for name in table if body.get(name) is not None}
    for name in required:
        if name not in given:
            raise ApiError(400, f"{name} is missing", name, "missing_required_parameter")
    return {name: table[name].rule(name, value) for name, value in given.items()}


def check_known(model: str, names: Collection[str]) -> None:
    """Check the name of a model. ApiError: it is none of ``names``."""
    if model not in names:
        shown = ", ".join(map(repr, names))
        text = f"the model {model[:100]!r} does not exist; this server has {shown}"
        raise ApiError(404, text, "model", "model_not_found")


def sampling_settings(table: Mapping[str, Field], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Sampling` that a request sets. ApiError: it sets one of them twice."""
    settings: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in values.items():
        setting = _setting(table, name, value)
        if setting is not None:
            value = value.value if isinstance(value, Constraint) else value
            if setting in settings:
                both = f"{origin[setting]} and {name}"
                raise ApiError(400, f"{both} are the same setting: give one of them", name)
            settings[setting], origin[setting] = value, name
    return settings


def setting_names(table: Mapping[str, Field], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the field of a request by the field of `Sampling` that it sets."""
    found = {_setting(table, name, value): name for name, value in values.items()}
    return {setting: name for setting, name in found.items() if setting is not None}


def _setting(table: Mapping[str, Field], name: str, value: Any) -> str | None:
    """Return the field of `Sampling` that a field of a request sets, if any."""
    return value.setting if isinstance(value, Constraint) else table[name].setting
