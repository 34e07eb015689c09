"""Tool calls in answers: formats of chat templates, any split into pieces, and text left alone."""

from __future__ import annotations

import json
import random

import pytest
from parsed_calls import joined, parsed

from graphllm.server.chat_text import chat_messages
from graphllm.server.harmony import HarmonyParser
from graphllm.server.reasoning import ReasoningParser
from graphllm.server.tool_call_parser import Text, ToolCallParser
from graphllm.server.tool_formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    ToolFormat,
    find_format,
)
from graphllm.server.tool_grammar import call_grammar
from graphllm.server.tools import without_tools

NAMES = ("add", "get_time")
ONE = '{"name": "add", "arguments": {"a": 1, "text": "} \\" ]é</tool_call>"}}'
TWO = '{"name":"get_time","arguments":{}}'
ADD, TIME = ("add", {"a": 1, "text": '} " ]é</tool_call>'}), ("get_time", {})
COUNT = 100_000
TURNED = '{"arguments": {"a": 2}, "name": "add"}'


def parse(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]], int]:
    """Text, calls as (name, JSON text), and the number of complete calls."""
    return parsed(ToolCallParser(form, NAMES), pieces)


@pytest.mark.parametrize("form, answer, shown, calls", [
    (HERMES, f"<tool_call>\n{ONE}\n</tool_call>", "", [ADD]),
    (HERMES, f"\n\n<tool_call>{ONE}</tool_call>\n<tool_call>\n{TWO}\n</tool_call>\n", "",
     [ADD, TIME]),
    (HERMES, f"I add.\n<tool_call>{TURNED}</tool_call> Done <b>.", "I add.\n Done <b>.",
     [("add", {"a": 2})]),
    (HERMES, f"<tool_call>{ONE}", "", [ADD]),
    (HERMES, "a <tool b> <tool_call", "a <tool b> <tool_call", []),
    (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    (HERMES, "<tool_call>[1]</tool_call>x", "<tool_call>[1]</tool_call>x", []),
    (HERMES, '<tool_call>{"arguments": {}, "name": []}</tool_call>',
     '<tool_call>{"arguments": {}, "name": []}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
     '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', []),
    (HERMES, f"<tool_call>{ONE[:-1]}</tool_call> and <tool_call>{TWO}</tool_call> end", " and  end",
     [ADD, TIME]),
    (HERMES, f"<tool_call>{ONE[:-1]}, \"id\": \"a}}b\"}}</tool_call>", "", [ADD]),
    (HERMES, ONE, ONE, []),
    (HERMES, "  \n", "  \n", []),
    (MISTRAL, f" [{ONE}, {TWO}]", "", [ADD, TIME]),
    (MISTRAL, f"[ {TURNED} ]", "", [("add", {"a": 2})]),
    (MISTRAL, '[{"id": 1}]', '[{"id": 1}]', []),
    (MISTRAL, "[INST] a [1]", "[INST] a [1]", []),
    (MISTRAL_NAMED, 'add{"a": 1, "text": "} \\" ]é</tool_call>"}', "", [ADD]),
    (MISTRAL_NAMED, ' add {"a": 2}\nget_time{} ', "", [("add", {"a": 2}), TIME]),
    (MISTRAL_NAMED, 'get_time{}add is {x}', "add is {x}", [TIME]),
    (MISTRAL_NAMED, "add it {", "add it {", []),
    (MISTRAL_NAMED, "addition{}", "addition{}", []),
    (MISTRAL_NAMED, "get_ti", "get_ti", []),
    (MISTRAL_NAMED, " ", " ", []),
    (MISTRAL_NAMED, 'rm{"a": 1}', 'rm{"a": 1}', []),
    (LLAMA3, ONE.replace("arguments", "parameters"), "", [ADD]),
    (LLAMA3, f"{TWO}; {ONE}", "", [TIME, ADD]),
    (LLAMA3, '{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
    (LLAMA3, '{"name": "add", "arguments"', '{"name": "add", "arguments"', []),
    (LLAMA3, " plain { text }", " plain { text }", []),
    (LLAMA3, f"{TWO} {{ ", " { ", [TIME]),
    (MISTRAL, f"[{TWO}] a ", " a ", [TIME]),
    (HERMES, f"<tool_call>{{{' ' * 100}{ONE[1:]}", "", [ADD]),
    (HERMES, f'<tool_call>{{"name": "{"a" * 65}", "arguments": {{}}}}',
     f'<tool_call>{{"name": "{"a" * 65}", "arguments": {{}}}}', []),
    (HERMES, '<tool_call>{"name": "add", "name": 1, "arguments": {}}',
     '<tool_call>{"name": "add", "name": 1, "arguments": {}}', []),
])  # fmt: skip
def test_calls_and_text(form, answer, shown, calls):
    """However the answer is split into pieces."""
    rng = random.Random(0)
    whole = parse(form, [answer])
    assert (whole[0], [(name, json.loads(text)) for name, text in whole[1]]) == (shown, calls)
    assert whole[2] == len(calls)
    assert parse(form, list(answer)) == whole
    for _ in range(20):
        cuts = sorted(rng.randrange(len(answer) + 1) for _ in range(4))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)])]
        assert parse(form, pieces) == whole


@pytest.mark.parametrize("begun, answer, reasoning, content", [
    (False, "<think>\nI add.\n</think>\n\nIt is <5>.", "\nI add.\n", "It is <5>."),
    (True, "I </thin add.</think>Yes", "I </thin add.", "Yes"),
    (True, "cut off </thi", "cut off </thi", ""),
    (False, " <thin> no </think>", "", " <thin> no </think>"),
    (False, "<th", "", "<th"),
])  # fmt: skip
def test_reasoning(begun, answer, reasoning, content):
    for pieces in ([answer], list(answer), [answer[:9], answer[9:]]):
        parser = ReasoningParser(begun)
        found = [*map(parser.push, pieces), parser.push("", last=True)]
        assert ["".join(each) for each in zip(*found)] == [reasoning, content]


ADDS = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize("answer, reasoning, content, calls", [
    ("<|channel|>analysis<|message|>I <add>.<|end|><|start|>assistant<|channel|>final<|message|>5",
     "I <add>.", "5", []),
    (f"<|channel|>analysis<|message|>Hm<|end|>{ADDS}{{\"a\": 1}}", "Hm", "",
     [("add", '{"a": 1}')]),
    (f"<|channel|>commentary<|message|>Now:<|end|>{ADDS}{{}}<|call|>", "", "Now:",
     [("add", "{}")]),
    ("<|channel|>commentary to=functions.rm<|message|>{}", "", "{}", []),
    (' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}', "", "",
     [("add", '{"a": 1}')]),
    ("assistant<|channel|>analysis<|message|>Hm<|end|>\n<|start|>assistant to=functions.get_time"
     "<|channel|>commentary<|message|>{}<|call|>", "Hm", "", [("get_time", "{}")]),
    ("<|message|>a<|end|> tea", "", "a tea", []),
    ("plain <|text", "", "plain <|text", []),
    ("Hello <|channel|>final<|message|>5", "", "Hello <|channel|>final<|message|>5", []),
    ("assistant of" + " text" * 200 + "<|message|>a", "",
     "assistant of" + " text" * 200 + "<|message|>a", []),
    (" assist", "", " assist", []),
    ("  ", "", "  ", []),
    ("<|channel|>anal", "", "", []),
    (" to=functions.add<|channel|>comm", "", "", []),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>fin", "a", "", []),
])  # fmt: skip
def test_harmony(answer, reasoning, content, calls):
    """However the answer is split: at every character, and into single ones."""
    splits = [[*answer], *([answer[:at], answer[at:]] for at in range(len(answer)))]
    for *pieces, end in ([answer], *splits, *([*pieces, ""] for pieces in splits)):
        parser, shown, made = HarmonyParser(NAMES), ["", ""], dict[int, list[str]]()
        found = [*(parser.push(each, last=False) for each in pieces), parser.push(end, last=True)]
        for part in joined(found):
            if isinstance(part, Text):
                shown[not part.reasoning] += part.text
            else:
                made.setdefault(part.index, [part.name, ""])[1] += part.arguments
        assert (shown, [*map(tuple, made.values())]) == ([reasoning, content], calls)
        assert parser.calls == len(calls)


def test_a_header_of_harmony_is_bounded():
    """Text that begins as a header does is passed on, before the answer ends."""
    parser = HarmonyParser(NAMES)
    found = joined(parser.push("assistant ", last=False) for _ in range(100))
    assert "".join(part.text for part in found) == "assistant " * 100


@pytest.mark.parametrize("form, answer, calls", [
    (HERMES, "<tool_call>{" * COUNT, 0),
    (HERMES, "<tool_call>{" * COUNT + "}" * COUNT, 0),
    (HERMES, "<tool_call>[" * COUNT, 0),
    (HERMES, f"<tool_call>{TWO}</tool_call>" * COUNT, COUNT),
    (MISTRAL, "[" + ",".join([TWO] * COUNT) + "]", COUNT),
    (MISTRAL_NAMED, "get_time{}" * COUNT, COUNT),
    (LLAMA3, ";".join([TWO] * COUNT), COUNT),
], ids=["open", "nested", "other", "hermes", "mistral", "named", "llama3"])  # fmt: skip
def test_time_is_linear(form, answer, calls):
    """Quadratic time would be minutes."""
    shown, _, count = parse(form, [answer])
    assert count == calls and shown == ("" if calls else answer)


@pytest.mark.parametrize("form, begun, filler", [
    (HERMES, "<tool_call>", "    "), (HERMES, "<tool_call>{", "    "), (HERMES, "", "    "),
    (HERMES, '<tool_call>{"', "aaaa"), (HERMES, '<tool_call>{"name": "', "aaaa"),
    (HERMES, f"<tool_call>{ONE}", "    "), (MISTRAL, "", "    "), (MISTRAL, f"[{TWO},", "    "),
    (MISTRAL, f"[{TWO}]", "    "), (MISTRAL_NAMED, "add", "    "), (LLAMA3, "{", "    "),
])  # fmt: skip
def test_text_that_is_held_back_is_bounded(form, begun, filler):
    """Otherwise each piece of an answer takes longer than the last one."""
    parser = ToolCallParser(form, NAMES)
    parser.push(begun)
    shown = joined(parser.push(filler) for _ in range(400))
    passed = "".join(part.text for part in shown if isinstance(part, Text))
    assert passed.endswith(filler * 390) and shown[-1] == Text(filler)


def test_leading_white_space_of_reasoning_is_bounded():
    parser = ReasoningParser(begun=False)
    found = [parser.push("    ") for _ in range(400)]
    assert found[-1] == ("", "    ") and len("".join(text for _, text in found)) == 1600
    whole = ReasoningParser(begun=False).push(" " * 1600 + "<think>", last=True)
    assert whole == ("", " " * 1600 + "<think>")


@pytest.mark.parametrize("message, parts", [
    (f"{ADDS}{{}}<|call|>", 2), ("Hm<|end|>", 1), ("<|channel|>analysis<|message|>", 0),
])  # fmt: skip
def test_time_of_harmony_is_linear(message, parts):
    """As `test_time_is_linear`, of the messages of one push."""
    found = HarmonyParser(NAMES).push(message * COUNT, last=True)
    assert len(found) == parts * COUNT or not parts


def test_arguments_come_as_they_are_written():
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('Hm <tool_call>{"name": "add", "arguments": {"a"')[0] == Text("Hm ")
    (part,) = parser.push(": 1")
    assert (part.index, part.name, part.arguments) == (0, "", ": 1") and not parser.calls


@pytest.mark.parametrize("form", [HERMES, MISTRAL, MISTRAL_NAMED, LLAMA3])
@pytest.mark.parametrize("several", [False, True])
def test_grammars_give_calls_that_are_parsed(form, several):
    """Texts that the grammar accepts are calls, and others are refused."""
    llguidance = pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}}
             for name in NAMES]  # fmt: skip
    grammar = llguidance.LLMatcher.grammar_from_lark(call_grammar(form, tools, several))

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
        tokens = (*(bytes([i]) for i in range(256)), b"<eos>")

        def __call__(self, text: str) -> list[int]:
            return list(text.encode())

    own = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))

    def accepts(text: str) -> bool:
        matcher = llguidance.LLMatcher(own, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()

    call = f'{{"name": "add", "{form.key}": {{"a": 1}}}}'
    if form is MISTRAL:
        one, two = f"[{call}]", f"[{call}, {call}]"
    elif form is MISTRAL_NAMED:
        one, two = 'add{"a": 1}', 'add{"a": 1}add{"a": 1}'
    else:
        begin, end = (f"{form.begin}\n", f"\n{form.end}") if form.begin else ("", "")
        one = begin + call + end
        two = one + ("\n" if form.begin else "; ") + one
    assert accepts(one) and accepts(two) == several
    assert not accepts(one.replace("1", '"1"')) and not accepts("Hello")
    for text, count in ((one, 1), (two, 2)):
        assert [name for name, _ in parse(form, [text])[1]] == ["add"] * count


def test_formats_of_templates():
    assert find_format("{% if tools %}<tool_call>{% endif %}") == (HERMES, True)
    assert find_format("tools [TOOL_CALLS]") == (MISTRAL, True)
    assert find_format("tools [TOOL_CALLS] [ARGS]") == (MISTRAL_NAMED, True)
    assert find_format("tools <|python_tag|>") == (LLAMA3, True)
    assert find_format("{{ messages }}") == (HERMES, False)
    with pytest.raises(
        Exception, match=r"format of tool calls of this model \(<function=\) is not"
    ):
        find_format("tools <function=")


def test_calls_and_results_as_text():
    """For a template without tools: results of two calls are one turn, and content may be parts."""
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    parts = [{"type": "text", "text": "by"}, {"type": "text", "text": "e"}]
    system, asked, called, results, said = without_tools([
        {"role": "system", "content": parts}, {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "So:", "tool_calls": [call, call]},
        {"role": "tool", "content": "2"}, {"role": "tool", "content": parts},
        {"role": "assistant", "content": parts},
    ])  # fmt: skip
    assert system["content"] == said["content"] == "bye" and asked["content"] == "1 + 1?"
    assert called["content"].count("<tool_call>") == 2 and called["role"] == "assistant"
    assert results == {
        "role": "user",
        "content": "<tool_response>\n2\n</tool_response>\n<tool_response>\nbye\n</tool_response>",
    }


def test_ids_for_templates_that_want_nine_characters():
    template = "tool [TOOL_CALLS] {% if message.id|length != 9 %}"
    call = {"id": "call_123456789", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "tool_calls": [call, {**call, "id": "abcdefghi"}]},
        {"role": "tool", "tool_call_id": "call_123456789", "content": "2"},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"},
    ]
    (called, *results), _ = chat_messages(messages, None, template)
    ids = [call["id"] for call in called["tool_calls"]]
    assert ids == [result["tool_call_id"] for result in results]
    assert ids[1] == "abcdefghi" and len(ids[0]) == 9 and ids[0].isalnum()
    (called, *_), _ = chat_messages(messages, None, "tool [TOOL_CALLS]")
    assert called["tool_calls"][0]["id"] == "call_123456789"
