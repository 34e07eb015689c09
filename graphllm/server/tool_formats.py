"""Formats of tool calls, by chat template."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ApiError


@dataclass(frozen=True)
class ToolFormat:
    """How a chat template writes tool calls, each an object with a name and arguments.

    Attributes:
        name: name of the format.
        begin, end: what encloses a call, or all calls if they are a list; control tokens, which
            answers do not show, are left out.
        key: key of the arguments.
        listed: whether the calls are one JSON list.
        anywhere: whether text may precede the calls.
        named: whether a call is the name and the arguments, without an object around them.
        id_length: letters and digits of an id between name and arguments.
    """

    name: str
    begin: str
    end: str
    key: str = "arguments"
    listed: bool = False
    anywhere: bool = False
    named: bool = False
    id_length: int = 0


@dataclass(frozen=True)
class ArgumentTags:
    """How each argument of a call is written: ``KEY_BEGIN key KEY_END value VALUE_END``.

    White space may precede each part. Strings are written as they are, other values as JSON.

    Attributes:
        key_begin, key_end: what encloses the name of an argument.
        value_begin: what precedes the value; empty for nothing.
        value_end: what follows the value.
        lines: whether a line break before and after the value is no part of it.
    """

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    lines: bool = False


@dataclass(frozen=True)
class TaggedFormat(ToolFormat):
    """A format whose calls are a name and arguments between markers: ``begin NAME separator ...``.

    Attributes:
        wrapper: what may precede a call, or several calls.
        separator: what follows the name.
        ends: what may follow the arguments of a call, in this order; the first one of `tags` must.
        tags: how the arguments are written; None for a JSON object.
        wrapped: whether the wrapper encloses all calls of an answer together.
    """

    wrapper: str = ""
    separator: str = ""
    ends: tuple[str, ...] = ()
    tags: ArgumentTags | None = None
    wrapped: bool = False

    @property
    def example(self) -> str:
        """A call, to describe the format to a model."""
        return f"{self.wrapper}{self.begin}NAME{self.separator}OBJECT{''.join(self.ends)}"


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", anywhere=True)  # Qwen, too
MISTRAL = ToolFormat("mistral", "[", "]", listed=True)  # after the control token [TOOL_CALLS]
# Each call follows [TOOL_CALLS], its arguments [ARGS]: both control tokens.
MISTRAL_NAMED = ToolFormat("mistral named", "", "", named=True)
MISTRAL_WITH_IDS = ToolFormat("mistral with ids", "", "", named=True, id_length=9)  # [CALL_ID]
LLAMA3 = ToolFormat("llama3", "", "", key="parameters")

HARMONY = ToolFormat("harmony", "", "")  # gpt-oss; see `harmony.HarmonyParser`

# Sources: the chat templates of deepseek-ai/DeepSeek-R1 and DeepSeek-V3.1 and the model card of
# the latter, zai-org/GLM-4.5 and GLM-4.7, and Qwen/Qwen3-Coder-480B-A35B-Instruct.
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_R1 = TaggedFormat(
    "deepseek r1", f"{_CALL}function<｜tool▁sep｜>", "", anywhere=True, wrapper=_CALLS,
    separator="\n```json\n", ends=("\n```", _CALL_END, _CALLS_END), wrapped=True,
)  # fmt: skip
DEEPSEEK_V31 = TaggedFormat(
    "deepseek v3.1", _CALL, "", anywhere=True, wrapper=_CALLS, separator="<｜tool▁sep｜>",
    ends=(_CALL_END, _CALLS_END), wrapped=True,
)  # fmt: skip
GLM = TaggedFormat(
    "glm", "<tool_call>", "", anywhere=True, ends=("</tool_call>",),
    tags=ArgumentTags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)  # fmt: skip
QWEN_CODER = TaggedFormat(
    "qwen3-coder", "<function=", "", anywhere=True, wrapper="<tool_call>", separator=">",
    ends=("</function>", "</tool_call>"),
    tags=ArgumentTags("<parameter=", ">", "", "</parameter>", lines=True),
)  # fmt: skip

# What a template contains, in order of precedence, and its format; None: it is not supported.
_FORMATS: tuple[tuple[tuple[str, ...], ToolFormat | None], ...] = (
    (("<arg_key>", "<tool_call>"), GLM),
    (("<seed:tool_call>",), None),
    (("<function=", "<parameter="), QWEN_CODER),
    (("<function=",), None),  # Functionary
    (("[ARGS]", "[CALL_ID]"), MISTRAL_WITH_IDS),
    (("[ARGS]",), MISTRAL_NAMED),
    ((_CALL, "```json"), DEEPSEEK_R1),
    ((_CALL,), DEEPSEEK_V31),
    (("<|channel|>",), HARMONY),
    (("<tool_call>",), HERMES),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|python_tag|>",), LLAMA3),
)


def find_format(template: str) -> tuple[ToolFormat, bool]:
    """Return the format of a template's tool calls, and whether the template describes the tools.

    A template without tools gets `HERMES`, and `with_tool_texts` describes the tools. ApiError: the
    format is not supported.
    """
    for signs, form in _FORMATS:
        if all(sign in template for sign in signs) and "tool" in template:
            if form is None:
                text = f"the format of tool calls of this model ({signs[0]}) is not supported"
                raise ApiError(400, text, "tools", "unsupported_value")
            return form, re.search(r"\btools\b", template) is not None
    return HERMES, False
