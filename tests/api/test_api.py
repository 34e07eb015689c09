"""Public API: arguments and prompts of `graphllm.load` and `LLM`, and closing a model."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
import weakref
from fractions import Fraction
from pathlib import Path

import hf_files
import numpy as np
import pytest
import tiny_models as tiny

import graphllm
from graphllm import Completion, RequestError, Sampling
from graphllm.engine.request import ALIASES
from graphllm.errors import GraphllmError

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 6}
TEXT = "hello there"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_llama(tmp_path_factory.mktemp("api") / "tiny.gguf", tiny.llama_weights())


@pytest.fixture(scope="module")
def llm(path):
    return graphllm.load(path, device="cpu", chat_template="zephyr")


@pytest.fixture(scope="module")
def ids_only(tmp_path_factory):
    """Write a model directory without a tokenizer."""
    folder = hf_files.write(tmp_path_factory.mktemp("ids_only") / "hf", eos_token_id=2)
    return graphllm.load(folder, device="cpu")


class Odd:
    """An object whose repr is long, has line breaks, and may raise."""

    def __init__(self, text: str = "line\n" * 100) -> None:
        self.text = text

    def __repr__(self) -> str:
        if not self.text:
            raise ValueError
        return self.text


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text and len(text) < 600, text
    return text


# ----------------------------------------------------------------------------- sampling's arguments

NUMBERS = ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty",
           "frequency_penalty", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold",
           "dry_multiplier", "dry_base")  # fmt: skip
WHOLES = ("max_tokens", "top_k", "seed", "min_tokens", "penalty_last_n", "dry_allowed_length",
          "dry_penalty_last_n")  # fmt: skip
NO_NUMBER = ["1", b"1", None, [1], {}, 1j, True, np.True_, np.array([0.5]), Odd(), Odd("")]
BAD = [
    *((name, value, "must be an integer") for name in WHOLES
      for value in (1.5, "1", [1], np.float32(1), True, np.False_, Odd(), Fraction(1, 2))),
    *((name, value, "must be a number") for name in NUMBERS for value in NO_NUMBER),
    *((name, value, "must be a finite number") for name in NUMBERS
      for value in (float("nan"), float("inf"), np.float32("nan"))),
    ("temperature", 1e30, "must be below 1e+30 in size"),
    *((name, None, "must be an integer") for name in ("max_tokens", "top_k", "min_tokens")),
    ("temperature", -0.1, "temperature = -0.1 must be at least 0"),
    ("temperature", 10**400, "must be below 1e+30 in size"),
    ("presence_penalty", -1e30, "must be below 1e+30 in size"),
    ("top_p", 0, "top_p = 0 must be in (0, 1]"),
    ("top_p", 1.5, "top_p = 1.5 must be in (0, 1]"),
    ("min_p", 2, "min_p = 2 must be in [0, 1]"),
    ("repeat_penalty", 0, "repeat_penalty = 0 must be in [0.01, 100]"),
    ("max_tokens", -1, "max_tokens = -1 must be at least 0"),
    ("top_k", 2**31, "top_k = 2147483648 must be in 0..2^31-1"),
    ("seed", -1, "seed = -1 must be in 0..2^63-1"),
    ("seed", 2**63, "must be in 0..2^63-1"),
    *(("ignore_eos", value, "must be True or False") for value in ("no", 0, 1, None, [])),
    *(("stop", value, "must be non-empty strings")
      for value in ("", ["a", ""], [1], 1, None, b"a", {"a": 1}, (s for s in ["x", ""]))),
    *(("stop_ids", value, "must be token ids")
      for value in (1, "12", [1.5], [-1], [True], ["1"], None, {1: 2}, np.array(3))),
    *((name, value, "must be token ids") for name in ("allowed_ids", "banned_ids")
      for value in (1, [1.5], [-1])),
    *(("logit_bias", value, "must be a mapping of token ids to numbers")
      for value in (1, [1], {"a": 1}, {-1: 0.0}, {1.5: 0})),
    ("logit_bias", {1: float("inf")}, "must be a finite number"),
    ("logit_bias", {1: "2"}, "must be a number"),
    ("typical_p", 0, "typical_p = 0 must be in (0, 1]"),
    ("xtc_probability", 1.5, "xtc_probability = 1.5 must be in [0, 1]"),
    ("dry_base", 0.5, "dry_base = 0.5 must be at least 1"),
    ("penalty_last_n", -2, "penalty_last_n = -2 must be in -1..2^31-1"),
    ("sampling", 5, "must be a graphllm.Sampling or a mapping"),
    ("sampling", [{"temperature": 1}], "must be a graphllm.Sampling or a mapping"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_invalid_sampling_values(llm, name, value, message):
    with pytest.raises(RequestError) as caught:
        llm.generate(TEXT, **{name: value})
    assert one_line(caught.value).startswith(f"{name} = ") and message in str(caught.value)
    assert caught.value.argument == name
    if name != "sampling":
        if hasattr(value, "gi_frame"):
            return  # the generator is exhausted
        with pytest.raises(RequestError):
            Sampling(**{name: value}).normalize()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logit_bias": {10**6: 1.0}}, "token id 1000000 is not in"),
        ({"allowed_ids": [10**6]}, "token id 1000000 is not in"),
        ({"penalty_last_n": 1025}, "penalty_last_n = 1025 must be at most 1024"),
        ({"dry_penalty_last_n": 1025}, "dry_penalty_last_n = 1025 must be at most 1024"),
        ({"allowed_ids": [1] * 257}, "allowed_ids has 257 token ids; at most 256"),
    ],
)
def test_settings_that_the_model_or_the_engine_cannot_apply(llm, arguments, message):
    with pytest.raises(RequestError) as caught:
        llm.generate(TEXT, **arguments)
    assert message in one_line(caught.value)


GOOD = [
    ("max_tokens", np.int64(4), 4), ("top_k", np.uint8(3), 3), ("seed", np.int32(7), 7),
    ("max_tokens", np.array(4), 4), ("temperature", np.float32(0.5), 0.5),
    ("temperature", np.float16(0.5), 0.5), ("temperature", 1, 1.0), ("top_p", np.int64(1), 1.0),
    ("min_p", Fraction(1, 2), 0.5), ("ignore_eos", np.True_, True), ("seed", None, None),
    ("stop", "x", ("x",)), ("stop", (s for s in ["x", "y"]), ("x", "y")),
    ("stop", np.array(["x"]), ("x",)), ("stop_ids", np.array([3, 4]), (3, 4)),
    ("stop_ids", (i for i in [3]), (3,)), ("stop_ids", {5}, (5,)),
    ("logit_bias", {np.int64(3): np.float32(0.5), 4: -math.inf}, {3: 0.5, 4: -math.inf}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "plain"), GOOD)
def test_numpy_scalars_and_iterables_are_accepted(name, value, plain):
    found = getattr(Sampling.from_arguments("test", {name: value}), name)
    assert found == plain and type(found) is type(plain)
    if isinstance(found, tuple):
        assert all(type(a) is type(b) for a, b in zip(found, plain))


def test_stop_strings_from_a_generator(llm):
    free = llm.generate(TEXT, **GREEDY).text
    stop = free[3]
    done = llm.generate(TEXT, stop=(s for s in [stop]), **GREEDY)
    assert done.text == free[: free.index(stop)] and done.finish_reason == "stop"


def test_numpy_scalars_generate_the_same(llm):
    want = llm.generate(TEXT, max_tokens=5, temperature=0.5, seed=3)
    have = llm.generate(TEXT, max_tokens=np.int64(5), temperature=np.float64(0.5), seed=np.int8(3))
    assert have.ids == want.ids and have.seed == 3


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_of_other_programs(llm, alias):
    values = {"stop": ["e"], "stop_ids": [5], "allowed_ids": [5], "typical_p": 0.5,
              "beam_groups": 1, "processors": [lambda ids, logits: -logits]}  # fmt: skip
    value = values.get(ALIASES[alias], 2)
    want, have = (llm.generate(TEXT, seed=1, **{name: value}) for name in (ALIASES[alias], alias))
    assert (have.ids, have.text) == (want.ids, want.text)
    with pytest.raises(RequestError, match=f"{alias} and {ALIASES[alias]} are the same argument"):
        llm.generate(TEXT, **{alias: value, ALIASES[alias]: value})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("top_P", "top_p"),
     ("num_predict", "max_tokens"), ("stop_string", "stop"), ("xyz", "")],
)  # fmt: skip
def test_an_unknown_argument_suggests_the_nearest_name(llm, name, nearest):
    calls = (llm.generate, llm.stream, llm.chat, llm.chat_stream)
    for call in (*calls, lambda text, **more: llm.conversation(**more)):
        with pytest.raises(RequestError, match=f"has no argument {name!r}") as caught:
            call(TEXT, **{name: 1})
        hint = f"; nearest: {nearest}" if nearest else "; known: max_tokens, "
        assert hint in one_line(caught.value)


def test_a_sampling_object_is_accepted(llm):
    own = Sampling(max_tokens=5, temperature=0.9, seed=2)
    want = llm.generate(TEXT, max_tokens=5, temperature=0.9, seed=2).ids
    assert llm.generate(TEXT, sampling=own).ids == want
    assert llm.generate(TEXT, sampling=own, max_tokens=2).ids == want[:2]
    assert isinstance(llm.generate(TEXT, sampling=own), Completion)


def test_each_of_several_prompts_gets_its_own_seed(llm):
    seeds = {done.seed for done in llm.generate([TEXT] * 4, max_tokens=1)}
    assert len(seeds) == 4
    assert {done.seed for done in llm.generate([TEXT] * 3, max_tokens=1, seed=5)} == {5}


# --------------------------------------------------------------------------------- load's arguments


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("context", value, "must be an integer") for value in (1.5, "8", None, True, [8])),
        ("context", 0, "context = 0 must be at least 1"),
        ("context", -(10**30), "must be at least 1"),
        *(("threads", value, "must be an integer") for value in (1.5, "2", None, False)),
        ("threads", -1, "threads = -1 must be at least 0"),
        *(("gpu_layers", v, "must be auto, all or a number of layers")
          for v in (1.5, None, -1, "-1", "many", "", "1.5", "\u0663", True, [1])),
        *(("kv_type", value, "must be f32, f16, q8_0, q4_0 or fp8")
          for value in ("q3", 8, ["f16"], "")),
        *(("linear", value, "must be auto, integer or float") for value in ("int", None, 1)),
        *(("strict", value, "must be True or False") for value in ("no", 0, None)),
        ("deterministic", 1, "must be True or False"),
        *(("speculate", v, "must be off, auto or a number from 1 to 63")
          for v in (0, 64, True, None, "on", "-1", "9" * 5000, ["auto"])),
        *(("device", value, "must be a non-empty string") for value in (None, "", ["cpu"])),
        *(("type", value, "must be a non-empty string") for value in (8, "", ["q8_0"])),
        *(("no_fuse", v, "must be non-empty") for v in (None, 1, [1], "", b"all", {"all": 1})),
        *(("no_kernels", value, "must be non-empty strings") for value in (None, 1, [1], "")),
        *(("place", v, "must be a mapping") for v in ("a=cpu", ["a"], {1: "cpu"}, {"a": 1})),
        *(("model_def", v, "must be a path") for v in (1, "", b"x.py", "a\0b", ["x.py"])),
        *(("chat_template", value, "must be a path") for value in (1, "", ["gemma"])),
        *(("progress", value, "must be a function") for value in (1, "bar", [print])),
        ("no_fuse", "al", "no fusion rule 'al'"),
        ("no_kernels", "cpu", "must begin with one of"),
        ("device", "gpu", "unknown backend 'gpu'"),
    ],
)  # fmt: skip
def test_invalid_arguments_of_load(path, name, value, message):
    for call in (graphllm.load, graphllm.dry_run):
        if call is graphllm.dry_run and name in ("chat_template", "progress", "speculate"):
            continue
        with pytest.raises(GraphllmError) as caught:
            call(path, **{name: value})
        assert message in one_line(caught.value)
        if "must be" in message:
            assert str(caught.value).startswith(f"{name} = ")


@pytest.mark.parametrize("model", [None, 5, "", b"demo", ["demo"], "a\0b", object(), {}])
def test_invalid_models(model):
    with pytest.raises(RequestError, match=r"model = .* must be a path"):
        graphllm.load(model)


def test_load_accepts_numpy_scalars_and_single_names(path):
    llm = graphllm.load(
        path, device="cpu", context=np.int64(32), threads=np.int32(1), strict=np.False_,
        gpu_layers=np.int64(2), no_fuse="all", no_kernels="cpu:silu",
    )  # fmt: skip
    assert llm.limits.context == 32 and type(llm.limits.context) is int
    ops = llm.placement()
    assert "silu" in ops["reference"] and "glu" not in ops["cpu"]
    assert llm.generate(TEXT, **GREEDY).ids


# ------------------------------------------------------------------------------------------ prompts


def test_token_ids_as_prompts(llm):
    want = llm.generate(TEXT, **GREEDY)
    ids = llm.encode(TEXT)
    for prompt in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint16), (i for i in ids)):
        have = llm.generate(prompt, **GREEDY)
        assert (have.ids, have.text, have.prompt_ids) == (want.ids, want.text, ids)
        assert all(type(i) is int for i in have.prompt_ids)
    assert "".join(llm.stream(np.array(ids), **GREEDY)) == want.text
    np.testing.assert_array_equal(llm.logits(TEXT), llm.logits(np.array(ids)))
    assert llm.profile(tuple(ids), decode=1, repeat=1).phases
    assert list(llm.trace(np.array(ids), "lm_head")) == ["lm_head"]


def test_several_prompts_of_strings_and_ids(llm):
    ids = llm.encode(TEXT)
    want = llm.generate(TEXT, **GREEDY).ids
    for several in ([TEXT, ids], (TEXT, TEXT), [ids, ids], np.array([ids, ids]), iter([TEXT, ids])):
        assert [done.ids for done in llm.generate(several, **GREEDY)] == [want, want]
    assert llm.generate([], **GREEDY) == []


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt = None must be a string or token ids"),
        (5, "prompt = 5 must be a string or token ids"),
        (b"hello", "must be a string or token ids"),
        (1.5, "must be a string or token ids"),
        (MESSAGES, "pass messages to llm.chat"),
        (MESSAGES[0], "pass messages to llm.chat"),
        ({"a": 1}, "must be a string or token ids"),
        ([1.5], "the element 1.5, which is not a token id"),
        ([1, True], "the element True, which is not a token id"),
        ([1, None], "the element None, which is not a token id"),
        (np.array([1.0]), "which is not a token id"),
        ([-1], "token id -1 is not in 0..399"),
        ([400], "token id 400 is not in 0..399"),
        ("", None),
    ],
)
def test_invalid_prompts(llm, prompt, message):
    calls = [llm.generate, llm.stream, llm.logits, lambda p: llm.trace(p, "lm_head"), llm.profile]
    for call in calls if message else ():
        with pytest.raises(RequestError) as caught:
            next(iter(call(prompt)))
        assert message in one_line(caught.value)
    if message is None:  # the tokenizer adds BOS
        assert llm.generate(prompt, max_tokens=1).prompt_ids == [1]


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]], ["a"]])
def test_several_prompts_where_one_is_required(llm, prompt):
    for call in (llm.submit, llm.logits):
        with pytest.raises(RequestError, match="takes one prompt; llm"):
            call(prompt)
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.submit([])


def test_other_arguments_are_checked(llm):
    for call, message in (
        (lambda: llm.generate(TEXT, 5), "seen = 5 must be a function"),
        (lambda: llm.logits([3], last="no"), "last = 'no' must be True or False"),
        (lambda: llm.trace([3], 5), "scopes = 5 must be non-empty strings"),
        (lambda: llm.trace([3], "lm_head", ["x"]), "must be a mapping"),
        (lambda: llm.profile([3], decode=1.5), "decode = 1.5 must be an integer"),
        (lambda: llm.profile([3], repeat=0), "repeat = 0 must be at least 1"),
        (lambda: llm.encode(5), "prompt = 5 must be a string"),
        (lambda: llm.decode("12"), "ids = '12' must be token ids"),
        (lambda: llm.decode([400]), "token id 400 is not in"),
        (lambda: llm.conversation(system=5), "system = 5 must be a string"),
        (lambda: llm.chat("hi"), "pass a string to llm.generate"),
        (lambda: llm.chat(MESSAGES[0]), "takes a list of messages"),
        (lambda: llm.chat(None), "takes a list of messages"),
        (lambda: llm.chat(["hi"]), "message 0 is a str, not a mapping"),
        (lambda: llm.chat([{"role": "user"}]), "message 0 has no content"),
        (lambda: llm.chat([{"content": "x"}]), "message 0 has no role"),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert message in one_line(caught.value)


def test_a_model_without_a_tokenizer_generates_from_ids(ids_only):
    want = [int(i) for i in np.argmax(ids_only.logits([1, 5, 7]), axis=-1)][-1]
    done = ids_only.generate([1, 5, 7], max_tokens=4, temperature=0, ignore_eos=True)
    assert done.ids[0] == want and len(done.ids) == 4 and done.text == ""
    ended = ids_only.generate([1, 5, 7], max_tokens=4, temperature=0, stop_ids=[want])
    assert ended.ids == [] and ended.finish_reason == "stop"
    for call in (
        lambda: ids_only.generate("x"),
        lambda: ids_only.stream([1, 5]),
        lambda: ids_only.decode([5]),
    ):
        with pytest.raises(graphllm.ModelFileError, match="no tokenizer"):
            call()
    with pytest.raises(RequestError, match="needs a tokenizer; stop_ids do not"):
        ids_only.generate([1], stop="x")
    assert ids_only._eos_ids() == {2}


def test_decode_inverts_encode(llm):
    ids = llm.encode(TEXT)
    assert llm.decode(ids) == TEXT == llm.decode(np.array(ids))
    assert llm.decode([]) == ""
    assert llm.decode(ids, skip_special=False) == llm.tokenizer.decode(ids, skip_special=False)


def test_message_content_in_parts(llm):
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    want = llm.chat([{"role": "user", "content": "hello\nthere"}], **GREEDY)
    assert llm.chat([{"role": "user", "content": parts}], **GREEDY).prompt_ids == want.prompt_ids
    image = {"type": "image_url", "image_url": {"url": "data:" + "x" * 1000}}
    for bad in (image, "text", {"type": "text"}, {"text": 5}, None):
        with pytest.raises(RequestError, match=r"message 0: content\[1\]") as caught:
            llm.chat([{"role": "user", "content": [parts[0], bad]}])
        one_line(caught.value)


# ---------------------------------------------------------------------------------- flags in errors


def test_errors_of_the_api_name_arguments_and_no_flags(path, capfd, monkeypatch):
    """Only the command line adds the flag."""
    from graphllm import cli

    cases = [
        (lambda: graphllm.load(path, context=0), ["-c", "0"], "(-c)"),
        (lambda: graphllm.load(path, gpu_layers="x"), ["-ngl", "x"], "(-ngl)"),
        (
            lambda: graphllm.load(path, no_kernels="cpu:x"),
            ["--no-kernel", "cpu:x"],
            "(--no-kernel)",
        ),
        (lambda: graphllm.load(path).generate("x", top_p=0), ["--top-p", "0"], "(--top-p)"),
        (lambda: graphllm.load(path, context=2).generate("hello you"), ["-c", "2"], "(-c)"),
        (lambda: graphllm.load(path).template, ["--chat"], "(--chat-template)"),
        (lambda: graphllm.load(Path("x.py")), [], "no such file"),
    ]
    for call, words, flag in cases:
        with pytest.raises(GraphllmError) as caught:
            call()
        text = one_line(caught.value)
        assert " -" not in text and "(-" not in text, text
        monkeypatch.setattr(sys, "argv", ["graphllm", "run", str(path), "-p", "hello you", *words])
        if words:
            with pytest.raises(SystemExit):
                cli.main()
            last = capfd.readouterr().err.splitlines()[-1]
            assert last.startswith("error: ") and last.endswith(flag), last


# ------------------------------------------------------------------------------------------ its end


def test_repr_of_a_model(llm, path):
    assert repr(llm) == f"<LLM llama {path}, context 128, on cpu>"
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(
            TypeError, match="an LLM cannot be pickled or copied; load the model in"
        ):
            call(llm)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = llm.nothing


def test_every_use_of_a_closed_model_is_an_error(path):
    with graphllm.load(path, device="cpu", chat_template="zephyr") as llm:
        stream, talk = llm.stream(TEXT), llm.conversation()
        next(stream)
        answer = talk.ask("hello")
        next(answer)
    assert repr(llm) == f"<LLM llama {path}, closed>" and llm.closed
    llm.close()
    uses = [
        lambda: llm.generate(TEXT), lambda: llm.generate([3]), lambda: next(llm.stream(TEXT)),
        lambda: llm.stream([3]), lambda: llm.chat(MESSAGES), lambda: llm.logits([3]),
        lambda: llm.trace([3], "lm_head"), lambda: llm.profile([3]), lambda: llm.encode("x"),
        lambda: llm.decode([3]), lambda: llm.conversation(), lambda: next(talk.ask("x")),
        lambda: next(stream), lambda: next(answer), lambda: llm.placement(), lambda: llm.notes(),
        lambda: llm.misses(), lambda: llm.gpu_offload, lambda: llm.device, lambda: llm.scopes(),
        lambda: llm.template, lambda: llm.has_template, lambda: llm.tokenizer, lambda: llm.engine,
        lambda: llm.check_ids([3]), lambda: llm.encode_chat(MESSAGES),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(RequestError, match=r"^the model is closed$"):
            use()


def test_a_use_while_the_model_is_closed_is_the_same_error(path, monkeypatch):
    """Whatever another thread looks up, at any point of `close`."""
    llm, missing = graphllm.load(path, device="cpu"), []
    names = llm._freed & vars(llm).keys()

    def delete(self, name: str) -> None:
        object.__delattr__(self, name)
        for each in names - vars(self).keys():
            try:
                getattr(self, each)
            except RequestError as error:
                assert str(error) == "the model is closed"
                missing.append(each)

    monkeypatch.setattr(graphllm.LLM, "__delattr__", delete, raising=False)
    llm.close()
    assert {*missing} == names


def test_a_request_that_is_checked_while_the_model_is_closed_is_refused(path):
    llm = graphllm.load(path, device="cpu")
    engine = llm.engine

    class Prompt(list):
        """Closes the model, as another thread may, when its length is checked."""

        def __len__(self) -> int:
            llm.close()
            return super().__len__()

    generation = engine.submit(Prompt([3, 4]), graphllm.Sampling(seed=1), ())
    with pytest.raises(RequestError, match=r"^the model is closed$"):
        engine.next_result(generation)


def weak_references(llm) -> dict[str, weakref.ref]:
    executor = llm.executor
    weight, arena = next(executor.buffers.weight_buffers()), executor.arenas["host"]
    held = {"weight": weight, "arena": arena, "device": executor.devices["cpu"]}
    held |= {"decoder": llm.decoder, "placement": executor.model_placement}
    return {name: weakref.ref(each) for name, each in held.items()}


@pytest.mark.parametrize("how", ["close", "with", "del"])
def test_memory_is_freed_at_once(path, tmp_path, how):
    """Without the garbage collector, also with unfinished streams (except for ``del``)."""
    path = Path(shutil.copy(path, tmp_path))
    llm = graphllm.load(path, device="cpu", chat_template="zephyr")
    llm.generate(TEXT, **GREEDY)
    llm.trace(TEXT, "*.mlp")
    llm.profile(TEXT, decode=2, repeat=1)
    stream, answer = llm.stream(TEXT), llm.conversation().ask("hello")
    next(stream), next(answer)
    gc.collect()
    gc.disable()
    try:
        held = weak_references(llm)
        assert str(path) in Path("/proc/self/maps").read_text()
        if how == "close":
            llm.close()
        elif how == "with":
            with llm:
                pass
        else:
            del llm, stream, answer
        assert not [name for name, ref in held.items() if ref() is not None]
        if how == "del":
            assert str(path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.mark.realmodel
def test_the_memory_of_the_demo_is_freed(tmp_path):
    """Most of the memory that loading took is freed, despite an unfinished stream."""
    code = (
        "import gc, graphllm\n"
        "gc.disable()\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096 >> 20\n"
        "def use():\n"
        "    llm = graphllm.load('demo', device='cpu', context=512)\n"
        "    left = llm.stream('x'); next(left)\n"
        "    full = rss(); llm.close()\n"
        "    return full, rss()\n"
        "first, second = use(), use()\n"  # the first use also imports and compiles
        "print(second[0] - second[1], second[1] - first[1])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    freed, kept = map(int, run.stdout.split())
    assert freed > 200 and kept < 40


def test_closing_waits_for_the_running_request(path):
    llm = graphllm.load(path, device="cpu")
    want = llm.generate(TEXT, **{**GREEDY, "max_tokens": 100})
    begun, found = threading.Event(), []

    def generate() -> None:
        seen = lambda done, total: begun.set()  # noqa: E731
        found.append(llm.generate("x " + TEXT, seen, **{**GREEDY, "max_tokens": 100}))

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    assert begun.wait(60)
    llm.close()
    thread.join(60)
    assert len(found[0].ids) == len(want.ids) and llm.closed
    assert os.path.exists(path)
