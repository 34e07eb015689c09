"""Tool calls between markers: DeepSeek, GLM, Qwen3-Coder, and Mistral's with ids.

The answers are those that the published chat templates show for earlier calls (see `tool_formats`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from parsed_calls import parsed

from graphllm.server.chat_text import ToolUse, chat_messages
from graphllm.server.tagged_call_parser import TaggedCallParser
from graphllm.server.tool_call_parser import ToolCallParser
from graphllm.server.tool_formats import (
    DEEPSEEK_R1,
    DEEPSEEK_V31,
    GLM,
    MISTRAL_WITH_IDS,
    QWEN_CODER,
    TaggedFormat,
    ToolFormat,
    find_format,
)
from graphllm.server.tool_grammar import call_grammar

ADD = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "unit": {"enum": ["m", "km"]},
        "more": {"$ref": "#/$defs/list"},
    },
    "required": ["text"],
    "$defs": {"list": {"type": "array", "items": {"type": "boolean"}}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}}
         for name, schema in (("add", ADD), ("get_time", {"type": "object"}))]  # fmt: skip
VALUES = {"text": 'a "b"\n</tool_call> <é>', "count": -2, "unit": "km", "more": [True, False]}
JSON = json.dumps(VALUES, ensure_ascii=False)
BOTH = [("add", VALUES), ("get_time", {})]
COUNT = 20_000

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
R1_ADD = f"{CALL}function{SEP}add\n```json\n{JSON}\n```{CALL_END}"
R1_TIME = f"{CALL}function{SEP}get_time\n```json\n{{}}\n```{CALL_END}"
V31_ADD, V31_TIME = f"{CALL}add{SEP}{JSON}{CALL_END}", f"{CALL}get_time{SEP}{{}}{CALL_END}"
PAIRS = [(key, value if isinstance(value, str) else json.dumps(value))
         for key, value in VALUES.items()]  # fmt: skip
GLM_ADD = "<tool_call>add\n" + "".join(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in PAIRS
) + "</tool_call>"  # fmt: skip
GLM_TIME = "<tool_call>get_time\n</tool_call>"
QWEN_ADD = "<tool_call>\n<function=add>\n" + "".join(
    f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in PAIRS
) + "</function>\n</tool_call>"  # fmt: skip
QWEN_TIME = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"


def parse(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]], int]:
    """Text, calls as (name, JSON text), and the number of complete calls."""
    tagged = isinstance(form, TaggedFormat)
    parser = TaggedCallParser(form, TOOLS) if tagged else ToolCallParser(form, ["add", "get_time"])
    return parsed(parser, pieces)


@pytest.mark.parametrize("form, answer, shown, calls", [
    (DEEPSEEK_R1, f"{CALLS}{R1_ADD}\n{R1_TIME}{CALLS_END}", "", BOTH),
    (DEEPSEEK_R1, f"I add.\n{CALLS}{R1_TIME}{CALLS_END} Done", "I add.\n Done", BOTH[1:]),
    (DEEPSEEK_R1, f"{CALLS}{CALL}function{SEP}rm\n```json\n{{}}\n```",
     f"{CALLS}{CALL}function{SEP}rm\n```json\n{{}}\n```", []),
    (DEEPSEEK_V31, f"{CALLS}{V31_ADD}{V31_TIME}{CALLS_END}", "", BOTH),
    (DEEPSEEK_V31, f"{V31_TIME}x{CALLS}", f"x{CALLS}", BOTH[1:]),
    (DEEPSEEK_V31, f"{CALLS}{CALL}add{SEP}[1]", f"{CALLS}{CALL}add{SEP}[1]", []),
    (DEEPSEEK_V31, f"a <｜tool {CALL}", f"a <｜tool {CALL}", []),
    (GLM, f"\nHm.\n{GLM_ADD}\n{GLM_TIME}", "\nHm.\n", BOTH),
    (GLM, "<tool_call>add<arg_key>text</arg_key><arg_value>\n 5</arg_value><arg_key>count"
     "</arg_key><arg_value>two</arg_value></tool_call>\n", "",
     [("add", {"text": "\n 5", "count": "two"})]),
    (GLM, "<tool_call>get_time</tool_call> x", " x", BOTH[1:]),
    (GLM, "<tool_call>add it</tool_call>", "<tool_call>add it</tool_call>", []),
    (GLM, '<tool_call>{"name": "add"}</tool_call>', '<tool_call>{"name": "add"}</tool_call>', []),
    (QWEN_CODER, f"So:\n{QWEN_ADD}\n{QWEN_TIME}", "So:\n", BOTH),
    (QWEN_CODER, "<function=add>\n<parameter=text>\n\n a\n\n</parameter>\n<parameter=x>\nTrue\n"
     "</parameter>\n</function>", "", [("add", {"text": "\n a\n", "x": True})]),
    (QWEN_CODER, "<tool_call> <function=rm></function>", "<tool_call> <function=rm></function>",
     []),
    (QWEN_CODER, "a <func <tool_call> b", "a <func <tool_call> b", []),
    (MISTRAL_WITH_IDS, f"add123456789{JSON}get_timeaB3dE6gH9{{}}", "", BOTH),
    (MISTRAL_WITH_IDS, "add it", "add it", []),
    (MISTRAL_WITH_IDS, "add12345678", "add12345678", []),
    (MISTRAL_WITH_IDS, "Hello {}", "Hello {}", []),
    (MISTRAL_WITH_IDS, "add1234_6789{}", "add1234_6789{}", []),
    (MISTRAL_WITH_IDS, "get_time123456789{}add ", "add ", BOTH[1:]),
])  # fmt: skip
def test_calls_and_text(form, answer, shown, calls):
    """However the answer is split: at every character, and into single ones."""
    whole = parse(form, [answer])
    assert (whole[0], [(name, json.loads(text)) for name, text in whole[1]]) == (shown, calls)
    assert whole[2] == len(calls)
    for pieces in ([*answer], *([answer[:at], answer[at:]] for at in range(len(answer) + 1))):
        assert parse(form, pieces) == whole


@pytest.mark.parametrize("form, answer", [
    (DEEPSEEK_R1, R1_ADD), (DEEPSEEK_V31, V31_ADD), (GLM, GLM_ADD), (QWEN_CODER, QWEN_ADD),
])  # fmt: skip
def test_arguments_come_as_they_are_written(form, answer):
    """A call that is cut off anywhere has the beginning of its arguments, and is not complete."""
    whole = parse(form, [answer])[1][0][1]
    first = answer.index("a \\" if form.tags is None else 'a "')
    for at in range(first + 1, answer.index("km")):
        _, [(name, text)], complete = parse(form, [answer[:at]])
        assert (name, complete) == ("add", 0) and '"text": "' in text
        assert whole.startswith(text) or form.tags is not None  # "-" of -2 is no JSON value
    parser = TaggedCallParser(form, TOOLS)
    parser.push(answer[: first + 1])
    assert "".join(part.arguments for part in parser.push(answer[first + 1 : first + 2]))


@pytest.mark.parametrize("form, answer, calls", [
    (DEEPSEEK_R1, CALLS * COUNT, 0),
    (DEEPSEEK_R1, f"{CALL}function{SEP}" * COUNT, 0),
    (DEEPSEEK_V31, V31_TIME * COUNT, COUNT),
    (GLM, "<tool_call>add<arg_key>" * COUNT, None),
    (GLM, "<tool_call>" * COUNT, 0),
    (QWEN_CODER, "<tool_call> " * COUNT, 0),
    (QWEN_CODER, "<function=" * COUNT, 0),
    (QWEN_CODER, "<function=add><parameter=text>" + "\n</parameter" * COUNT, 0),
    (QWEN_CODER, "<function=add><parameter=x>" + "\n</parameter" * COUNT, 0),
    (QWEN_CODER, QWEN_TIME * COUNT, COUNT),
    (MISTRAL_WITH_IDS, "get_time123456789{}" * COUNT, COUNT),
])  # fmt: skip
def test_time_is_linear(form, answer, calls):
    """Quadratic time would be minutes; whole, and in pieces of 50 characters."""
    whole = parse(form, [answer])
    assert calls in (None, whole[2])
    assert parse(form, [answer[at : at + 50] for at in range(0, len(answer), 50)]) == whole


@pytest.mark.parametrize("form, one, two", [
    (DEEPSEEK_R1, f"{CALLS}{R1_ADD}{CALLS_END}", f"{CALLS}{R1_ADD}\n{R1_TIME}{CALLS_END}"),
    (DEEPSEEK_V31, f"{CALLS}{V31_ADD}{CALLS_END}", f"{CALLS}{V31_ADD}{V31_TIME}{CALLS_END}"),
    (GLM, GLM_ADD, f"{GLM_ADD}\n{GLM_TIME}"),
    (QWEN_CODER, QWEN_ADD, f"{QWEN_ADD}\n{QWEN_TIME}"),
    (MISTRAL_WITH_IDS, f"addAbCdEf123{JSON}", f"addAbCdEf123{JSON}get_time123456789{{}}"),
])  # fmt: skip
def test_grammars(form, one, two):
    """They accept what the templates show, and refuse calls that do not match the schemas."""
    llguidance = pytest.importorskip("llguidance")

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
        tokens = (*(bytes([i]) for i in range(256)), b"<eos>")

        def __call__(self, text: str) -> list[int]:
            return list(text.encode())

    own = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))

    def accepts(text: str, several: bool) -> bool:
        lark = call_grammar(form, TOOLS, several)
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
        matcher = llguidance.LLMatcher(own, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()

    assert accepts(one, False) and accepts(one, True)
    assert accepts(two, True) and not accepts(two, False)
    for wrong in (one.replace("-2", "x"), one.replace("km", "ft"), one.replace("text", "tax")):
        assert not accepts(wrong, True)
    assert not accepts("Hello", True)


def test_formats_of_templates():
    assert find_format("{% if tools %}<tool_call>name\n<arg_key>") == (GLM, True)
    assert find_format("tools <tool_call> <function=a> <parameter=") == (QWEN_CODER, True)
    assert find_format("tools [TOOL_CALLS] [CALL_ID] [ARGS]") == (MISTRAL_WITH_IDS, True)
    assert find_format(f"tool_calls {CALL} ```json") == (DEEPSEEK_R1, False)
    assert find_format(f"tool_calls {CALL}") == (DEEPSEEK_V31, False)


def test_a_template_that_does_not_describe_tools():
    """DeepSeek's: a system message does, and calls are text in messages without content."""
    template = f"tool {CALL} ```json {{% if x and message['content'] is none %}} f['arguments'] + x"
    call = {"type": "function", "function": {"name": "add", "arguments": '{"text": "é"}'}}
    messages: list[Any] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Hm", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    (system, *others), variables = chat_messages(
        messages, ToolUse(TOOLS, "auto", True, template), template
    )
    assert variables == {} and f"{CALLS}{CALL}function{SEP}NAME\n```json" in system["content"]
    assert '"get_time"' in system["content"]
    said, called = others[1:3]
    assert "tool_calls" not in said and (said["content"], called["content"]) == ("Hm", None)
    assert called["tool_calls"][0]["function"]["arguments"] == '{"text": "é"}'
