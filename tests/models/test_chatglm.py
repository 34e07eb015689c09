"""ChatGLM against its own oracle, and bidirectional prefixes in the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import chatglm_models
import chatglm_oracle
import numpy as np
import pytest
from chatglm_cases import CONFIG, GMASK, MASK, SOP, random_ids
from cuda_cases import DEVICES, need_device
from hf_models import SPECS, config_of, distance

import graphllm
from graphllm.engine import trace as traces
from graphllm.engine.request import Sampling
from graphllm.errors import ConfigError, RequestError
from graphllm.model import batch
from graphllm.profiler import bench
from graphllm.profiler.bench import Test

GREEDY = Sampling(temperature=0.0).normalize()
STEPS = 8
# (tokens of the prompt, tokens before sop; 0: no sop)
PROMPTS = ((1, 0), (7, 0), (7, 6), (40, 39), (40, 12), (3, 1))
VARIANTS = [(n, i) for n in ("chatglm", "chatglm2") for i in range(len(SPECS[n].tiny))]


def stepwise_logits(llm: graphllm.LLM, ids: list[int], prompt: int) -> np.ndarray:
    with llm.engine.evaluation(ids) as sequence:
        first = sequence.step_logits(ids[:prompt])
        return np.concatenate([first, *(sequence.step_logits([i]) for i in ids[prompt:])])


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
@pytest.mark.parametrize("device", DEVICES)
def test_logits(tmp_path: Path, name: str, variant: int, device: str) -> None:
    need_device(device)
    config = config_of(SPECS[name], variant)
    weights = chatglm_models.write(tmp_path, config)
    for prompt, before in PROMPTS:
        ids = random_ids(prompt + STEPS, before if name == "chatglm" else 0)
        llm = graphllm.load(tmp_path, device=device, kv_type="f32", context=len(ids))
        want = chatglm_oracle.oracle(config, weights, ids)
        assert distance(stepwise_logits(llm, ids, prompt), want) <= 1e-4


@pytest.mark.parametrize(
    "change",
    [{}, {"rope_ratio": 50.0, "multi_query_group_num": 1},
     {"multi_query_group_num": 6, "add_qkv_bias": False}],
)  # fmt: skip
def test_gguf_of_the_second_generation(tmp_path: Path, change: dict) -> None:
    """GGUF files as llama.cpp's converter writes them, without keys that have no effect."""
    config = {**config_of(SPECS["chatglm2"], 0), "hidden_size": 72, **change}
    weights = chatglm_models.random_weights(config)
    path = chatglm_models.write_gguf(tmp_path / "m.gguf", config, weights)
    ids = random_ids(40)
    found = graphllm.load(path, device="cpu", kv_type="f32").logits(ids)
    assert distance(found, chatglm_oracle.oracle(config, weights, ids)) <= 1e-4


# ------------------------------------------------------------------------ bidirectional prefixes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chatglm")
    chatglm_models.write(path, CONFIG)
    return path


def expected_logits(ids: Sequence[int]) -> np.ndarray:
    return chatglm_oracle.oracle(CONFIG, chatglm_models.random_weights(CONFIG), ids)


def load(folder: Path, device: str = "cpu", **options) -> graphllm.LLM:
    return graphllm.load(folder, device=device, kv_type="f32", **options)


def greedy_ids(llm: graphllm.LLM, ids: list[int], count: int) -> list[int]:
    ids_of = llm.engine.generate(ids, GREEDY, [])
    return [next(ids_of) for _ in range(count)]


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_ids(folder: Path, device: str) -> None:
    need_device(device)
    llm, ids = load(folder, device), random_ids(12, 11)
    for token in greedy_ids(llm, ids, 12):
        row = np.sort(expected_logits(ids)[-1])
        assert row[-1] - expected_logits(ids)[-1][token] <= 1e-4 * (row[-1] - row[0])
        ids.append(token)


def test_a_long_prompt_is_one_step(folder: Path) -> None:
    llm, ids = load(folder), random_ids(640, 639)
    assert llm.limits.tokens == 700
    assert distance(llm.logits(ids), expected_logits(ids)) <= 1e-4
    assert distance(llm.logits(ids, last=True), expected_logits(ids)[-1]) <= 1e-4


def test_more_tokens_in_one_step_than_rows_of_logits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "MAX_LOGITS_BYTES", 4 * 131 * 7)  # seven rows
    llm, ids = load(folder), random_ids(40, 25)
    with llm.engine.evaluation(ids) as sequence:
        assert [len(piece) for piece in sequence.logits(ids)] == [25, 7, 7, 1]
    assert distance(llm.logits(ids), expected_logits(ids)) <= 1e-4


def with_other_id(ids: list[int], at: int) -> list[int]:
    """Return ids with another one at ``at``."""
    return [*ids[:at], 121 + at % 3, *ids[at + 1 :]]


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (random_ids(20, 11), random_ids(30, 11), 20),  # continues
        (random_ids(30, 11), random_ids(12, 11), 11),  # all but the last token is cached
        (random_ids(20, 11), with_other_id(random_ids(30, 11), 15), 15),  # diverges after sop
        (
            random_ids(20, 11),
            with_other_id(random_ids(30, 11), 5),
            0,
        ),  # diverges before sop, in the bidirectional prefix
        (random_ids(20, 11), random_ids(30, 14), 0),  # same start, longer bidirectional prefix
        (random_ids(20, 11), random_ids(30), 0),  # same start, causal
        (random_ids(20), random_ids(30, 25), 0),
        (random_ids(20), random_ids(30), 20),
    ],
)
def test_prefix_reuse_by_the_cache(
    folder: Path, before: list[int], after: list[int], kept: int
) -> None:
    llm = load(folder)
    greedy_ids(llm, before, 1)
    llm.engine.settle()
    assert llm.engine.cached_tokens(after) == kept
    greedy_ids(llm, before, 3)
    first = greedy_ids(llm, after, 5)
    assert llm.engine.prefill_tokens == len(after) - kept
    llm.engine.clear_cache()
    assert greedy_ids(llm, after, 5) == first


@pytest.mark.parametrize(
    ("ids", "prefix"),
    [
        ([5, 6, 7], 0),
        ([5, 6, SOP, 7], 0),  # no prefix without a mask
        ([SOP, GMASK, 7], 0),
        ([GMASK, 5, 7], 0),
        ([5, 6, GMASK, SOP, 7], 3),
        ([5, 6, MASK, SOP, 7, GMASK, SOP], 3),
        ([5, MASK, GMASK, SOP, 7], 3),  # two kinds of mask
    ],
)
def test_bidirectional_prefix(folder: Path, ids: list[int], prefix: int) -> None:
    llm = load(folder)
    assert llm.decoder.bidirectional_prefix(ids) == prefix
    assert distance(llm.logits(ids), expected_logits(ids)) <= 1e-4


@pytest.mark.parametrize(
    "ids", [[5, GMASK, 6, SOP], [5, GMASK, GMASK, SOP], [5, MASK, 6, SOP], [5, GMASK, MASK, SOP]]
)
def test_masks_without_sop(folder: Path, ids: list[int]) -> None:
    llm = load(folder)
    for ask in (
        llm.logits,
        lambda ids: llm.trace(ids, "*.mlp"),
        lambda ids: greedy_ids(llm, ids, 1),
    ):
        with pytest.raises(
            RequestError, match=r"^token 2, [02], is a mask and must be followed by sop \(1\)$"
        ):
            ask(ids)


def test_steps_too_small_for_the_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, ids = load(folder), random_ids(40, 25)
    message = "^the first 25 tokens of the prompt are a bidirectional prefix, which must be"
    with pytest.raises(RequestError, match=message), llm.engine.evaluation(ids) as sequence:
        sequence.step_logits(ids[:24])
    want = llm.trace(ids, "*.layers.1")
    monkeypatch.setattr(traces, "MAX_STEP_BYTES", 4 * 72 * 20)  # a trace computes the prefix whole
    have = load(folder).trace(ids, "*.layers.1")
    assert want.keys() == have.keys() and all(np.array_equal(have[k], want[k]) for k in want)


def test_trace_of_a_bidirectional_prefix(folder: Path) -> None:
    llm, ids = load(folder), random_ids(40, 25)
    assert distance(llm.trace(ids, "lm_head")["lm_head"], expected_logits(ids)) <= 1e-4


def test_diff_profile_bench_and_plan(folder: Path) -> None:
    ids = random_ids(40, 25)
    assert graphllm.diff(folder, ids=ids, kv_type="f32").first is None
    llm = load(folder)
    assert [phase.tokens for phase in llm.profile(ids, decode=3, repeat=1).phases] == [40, 3]
    for test in (Test(8, 0, 16), Test(0, 3, 16)):
        bench.run(llm, test, 1, lambda done: None)
    planned = graphllm.dry_run(folder, device="cpu")
    assert (planned.prefill.tokens, planned.context) == (700, 700)


# ---------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("chatglm", {"position_encoding_2d": False}, "position_encoding_2d = False"),
        ("chatglm", {"quantization_bit": 4}, "quantization_bit = 4"),
        ("chatglm", {"pre_seq_len": 128}, "pre_seq_len = 128"),
        ("chatglm", {"gmask_token_id": None}, "missing key 'gmask_token_id'"),
        (
            "chatglm",
            {"num_attention_heads": 7},
            "num_attention_heads = 7 does not divide the hidden size 72",
        ),
        (
            "chatglm2",
            {"multi_query_group_num": 4},
            "6 attention heads are not a multiple of 4 KV heads",
        ),
        ("chatglm2", {"seq_length": None}, "missing key 'seq_length'"),
        ("chatglm2", {"vocab_size": 130}, "vocab_size = 130, but padded_vocab_size = 131"),
        ("chatglm2", {"mystery": 1}, "'mystery'"),
    ],
)
def test_refused_configurations(tmp_path: Path, name: str, change: dict, message: str) -> None:
    config = config_of(SPECS[name], 0)
    chatglm_models.write(tmp_path, config)
    changed = {"model_type": "chatglm", **config, **change}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError) as caught:
        graphllm.load(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
