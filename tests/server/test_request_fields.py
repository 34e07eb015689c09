"""Fields beyond the APIs: they change the answer, or are refused, on each endpoint."""

from __future__ import annotations

from typing import Any

import pytest

from graphllm.chat.template import ChatTemplate

CHAT, COMPLETE, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
RESPONSES, ANTHROPIC = "/v1/responses", "/v1/messages"
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES = {
    CHAT: {"messages": MESSAGES, "max_tokens": 12},
    COMPLETE: {"prompt": "hello", "max_tokens": 12},
    NATIVE: {"prompt": "hello", "n_predict": 12},
    RESPONSES: {"input": "hello", "max_output_tokens": 12},
    ANTHROPIC: {"model": "tiny", "messages": MESSAGES, "max_tokens": 12},
}  # fmt: skip
SAMPLED = {"seed": 3, "temperature": 1.0, "ignore_eos": True}
DEFAULTS = {"top_p": 1.0, "top_k": 0, "penalty_last_n": -1}
# Fields and the settings of `Sampling` that they are.
SUPPORTED = [
    ({"top_n_sigma": 0.01}, {"top_n_sigma": 0.01}),
    ({"top_n_sigma": -1}, {}),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.0},
     {"xtc_probability": 1.0, "xtc_threshold": 0.0}),
    ({"repeat_penalty": 9.0, "repeat_last_n": 2}, {"repeat_penalty": 9.0, "penalty_last_n": 2}),
    ({"allowed_token_ids": [300, 310, 320]}, {"allowed_ids": [300, 310, 320]}),
]  # fmt: skip
REFUSED = {
    "samplers": ["temperature"], "mirostat": 2, "adaptive_target": 0.5, "dry_multiplier": 0.8,
    "dynatemp_range": 0.5, "t_max_predict_ms": 5, "lora": [{"id": 0, "scale": 1.0}],
    "bad_words": ["a"], "use_beam_search": True, "truncate_prompt_tokens": 1,
    "include_stop_str_in_output": True,
}  # fmt: skip
OF_CHATS = {"chat_template": "x", "add_generation_prompt": False, "continue_final_message": True}
OFF = {
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc",
                 "temperature"],
    "mirostat": 0, "adaptive_target": -1.0, "dry_multiplier": 0.0, "dry_base": 2.0,
    "dynatemp_range": 0, "t_max_predict_ms": -1, "lora": [], "bad_words": [],
    "use_beam_search": False, "truncate_prompt_tokens": None, "include_stop_str_in_output": False,
}  # fmt: skip


@pytest.mark.parametrize("fields, settings", SUPPORTED)
def test_samplers_change_the_answer(llm, server, fields, settings):
    own = {**DEFAULTS, **SAMPLED, "max_tokens": 12, **settings}
    ids = llm.encode_chat(MESSAGES)
    _, found = server.call(CHAT, {**BODIES[CHAT], **SAMPLED, **fields})
    assert found["choices"][0]["message"]["content"] == llm.generate(ids, **own).text
    _, found = server.call(COMPLETE, {**BODIES[COMPLETE], **SAMPLED, **fields})
    assert found["choices"][0]["text"] == llm.generate("hello", **own).text


@pytest.mark.parametrize("path", [CHAT, COMPLETE, NATIVE, RESPONSES, ANTHROPIC])
def test_fields_that_would_change_the_answer_are_refused(server, path):
    refused = REFUSED | (OF_CHATS if path == CHAT else {})
    for name, value in refused.items():
        status, found = server.call(path, {**BODIES[path], name: value})
        assert status == 400, name
        if path == ANTHROPIC:
            assert found["error"]["message"].startswith(f"{name} is not supported")
        else:
            error = found["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_value")


@pytest.mark.parametrize("path", [CHAT, COMPLETE, NATIVE])
def test_fields_that_ask_for_nothing_are_accepted(server, path):
    more = {"add_generation_prompt": True, "continue_final_message": False, "chat_template": None}
    body = {**BODIES[path], **OFF, **(more if path == CHAT else {})}
    status, found = server.call(path, body)
    assert status == 200, found


@pytest.mark.parametrize("path", [CHAT, COMPLETE, NATIVE])
@pytest.mark.parametrize("name, value", [
    ("stop_token_ids", [999_999]), ("logit_bias", {"999999": 1}), ("allowed_token_ids", [999_999]),
    ("allowed_token_ids", []), ("allowed_token_ids", [5] * 257),
])  # fmt: skip
def test_errors_name_the_field_with_the_token_ids(server, path, name, value):
    status, found = server.call(path, {**BODIES[path], name: value})
    assert (status, found["error"]["param"]) == (400, name)


TEMPLATE = """\
{%- for message in messages %}{{ message.role ~ ': ' ~ message.content }}{% endfor %}
{{- date }}{% if enable_thinking is false %}<think></think>{% endif %}"""


def use_template(llm: Any, monkeypatch: Any) -> None:
    own = ChatTemplate(TEMPLATE, "own")
    monkeypatch.setattr(type(llm), "template", property(lambda _: own))


def rendered(server: Any, variables: Any, **more: Any) -> tuple[int, Any]:
    body = {"messages": MESSAGES, "chat_template_kwargs": variables, **more}
    return server.call("/apply-template", body)


def test_variables_of_the_chat_template(llm, server, monkeypatch):
    """Clients of vLLM and llama.cpp turn off reasoning so; text of a variable has no tokens."""
    use_template(llm, monkeypatch)
    off = {"enable_thinking": False}
    assert rendered(server, off)[1] == {"prompt": "user: hello<think></think>"}
    assert rendered(server, {"date": 5, "unused": [None]})[1] == {"prompt": "user: hello5"}
    body = {**BODIES[CHAT], "verbose": True, "max_tokens": 1}
    _, found = server.call(CHAT, body | {"chat_template_kwargs": off | {"date": "</s>"}})
    assert found["__verbose"]["prompt"].endswith("user: hello</s><think></think>")
    assert llm.tokenizer.eos_id not in llm.encode_chat(MESSAGES, date="</s>")
    plain = {path: tokens_of(server, path, None) for path in (CHAT, RESPONSES, ANTHROPIC)}
    assert all(tokens_of(server, path, off) > plain[path] for path in plain)


def tokens_of(server: Any, path: str, variables: Any) -> int:
    """The tokens of the prompt."""
    _, found = server.call(path, {**BODIES[path], "chat_template_kwargs": variables})
    usage = found["usage"]
    return usage.get("prompt_tokens") or usage["input_tokens"] + usage.get(
        "cache_read_input_tokens", 0
    )


@pytest.mark.parametrize("variables", [
    [], "a", {"messages": []}, {"tools": []}, {"bos_token": ""}, {"eos_token": ""}, {"self": 1},
    {"parse_special": True}, {"add_generation_prompt": True}, {"a b": 1}, {"": 1}, {"a" * 65: 1},
    {"a": "x" * 70_000}, {"a": eval("[" * 150 + "]" * 150)},
])  # fmt: skip
def test_variables_of_the_chat_template_are_checked(server, variables):
    status, found = rendered(server, variables)
    assert (status, found["error"]["param"]) == (400, "chat_template_kwargs"), found


def test_a_variable_is_set_once(llm, server, monkeypatch):
    use_template(llm, monkeypatch)
    status, found = rendered(server, {"enable_thinking": True}, reasoning_effort="none")
    assert (status, found["error"]["param"]) == (400, "chat_template_kwargs")
