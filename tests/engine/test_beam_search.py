"""Beam search: sequences and scores are those of transformers; groups those of the paper."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny

import graphllm
from graphllm.engine.beam_search import BeamSearch, advance
from graphllm.errors import RequestError

CASES = 30
MOST = 10  # generated tokens
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45, 46], [9]]


def case(seed: int) -> dict[str, Any]:
    """Return arguments of a search: every width, penalty and rule with every other one."""
    rng = random.Random(seed)
    return {
        "beams": (1, 2, 4, 7)[seed % 4],
        "length_penalty": (0.6, 1.0, 1.4)[seed % 3],
        "early_stopping": (True, False, "never")[seed // 3 % 3],
        "prompt": PROMPTS[seed % len(PROMPTS)],
        "ends": rng.choice([1, 2, 5, 30]),
        "most": rng.choice([1, 3, MOST]),
    }


def weights() -> dict[str, np.ndarray]:
    """A llama whose distributions are neither flat nor peaked."""
    found = tiny.llama_weights()
    found["lm_head.weight"] = 2.5 * found["lm_head.weight"]
    return found


class Oracle:
    """transformers' model, with the log-probabilities of the next token by prefix."""

    def __init__(self) -> None:
        self.model = tiny.hf_model("llama", weights())
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logprobs(self, ids: list[int]) -> np.ndarray:
        import torch

        if tuple(ids) not in self._known:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1]
            self._known[tuple(ids)] = torch.log_softmax(logits, -1).numpy()
        return self._known[tuple(ids)]

    def end_ids(self, made: dict[str, Any]) -> list[int]:
        """Return ids that are likely enough to end some hypotheses."""
        likely = np.argsort(-self.logprobs(made["prompt"]))[:40]
        return sorted(random.Random(made["ends"]).sample(likely.tolist(), made["ends"]))

    def generate(self, made: dict[str, Any], **processors: Any) -> list[tuple[list[int], float]]:
        """Return the generated ids, the end id included, and the score of all beams."""
        import torch

        ends, prompt = self.end_ids(made), torch.tensor([made["prompt"]])
        found = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), num_beams=made["beams"],
            num_return_sequences=made["beams"], length_penalty=made["length_penalty"],
            early_stopping=made["early_stopping"], max_new_tokens=made["most"],
            eos_token_id=ends, pad_token_id=0, do_sample=False, return_dict_in_generate=True,
            output_scores=True, **processors,
        )  # fmt: skip
        answers = []
        for row, score in zip(found.sequences, found.sequences_scores):
            ids = row[prompt.shape[1] :].tolist()
            cut = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
            answers.append((ids[:cut], float(score)))
        return answers

    def greedy(self, made: dict[str, Any]) -> list[int]:
        """Return the ids of greedy decoding, without the end id."""
        import torch

        ends, prompt = self.end_ids(made), torch.tensor([made["prompt"]])
        found = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), num_beams=1, do_sample=False,
            max_new_tokens=made["most"], eos_token_id=ends, pad_token_id=0,
        )  # fmt: skip
        ids = found[0, prompt.shape[1] :].tolist()
        return ids[:-1] if ids[-1] in ends else ids


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


Search = tuple[BeamSearch, list[int]]  # its rules and its prompt


def search(oracle: Oracle, *searches: Search) -> list[list[tuple[list[int], float]]]:
    """Return what each search finds, with no more candidates than the widest one asks for."""
    states = [rules.start() for rules, _ in searches]
    most = max(rules.candidates for rules, _ in searches)
    while live := [i for i, state in enumerate(states) if state.last]:
        rows = [[*searches[i][1], *tokens] for i in live for tokens in states[i].live_tokens()]
        logprobs = np.stack([oracle.logprobs(ids) for ids in rows])
        ids = np.argsort(-logprobs, kind="stable")[:, :most]
        going = [(searches[i][0], states[i]) for i in live]
        found = advance(going, ids, np.take_along_axis(logprobs, ids, 1))
        for i, state in zip(live, found):
            states[i] = state
    return [
        [(list(each.tokens), each.score) for each in state.best(rules.beams)]
        for state, (rules, _) in zip(states, searches)
    ]


def rules_of(made: dict[str, Any], oracle: Oracle, **more: Any) -> BeamSearch:
    names = ("beams", "length_penalty", "early_stopping", "most")
    return BeamSearch(**{n: made[n] for n in names}, end_ids=oracle.end_ids(made), **more)


def check(have, want) -> None:
    assert [ids for ids, _ in have] == [ids for ids, _ in want]
    assert [score for _, score in have] == pytest.approx([score for _, score in want], abs=1e-4)


@pytest.mark.parity
@pytest.mark.parametrize("seed", [seed for seed in range(CASES) if case(seed)["beams"] > 1])
def test_the_search_finds_what_transformers_finds(oracle, seed):
    made = case(seed)
    (found,) = search(oracle, (rules_of(made, oracle), made["prompt"]))
    check(found, oracle.generate(made))


# --------------------------------------------------------------------------------- diverse groups


def diverse(oracle: Oracle, made: dict[str, Any], groups: int, strength: float):
    """Algorithm 1 of Vijayakumar et al. 2016 with Hamming diversity, over whole distributions.

    Each group ends by the same rules as a search of its width alone.
    """
    ends, prompt, most = set(oracle.end_ids(made)), made["prompt"], made["most"]
    width, exponent = made["beams"] // groups, made["length_penalty"]
    live = [[(0.0, [])] for _ in range(groups)]
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(groups)]
    ended = [False] * groups
    for length in range(1, most + 1):
        used = np.zeros(len(oracle.logprobs(prompt)))  # by earlier groups, at this length
        for g in range(groups):
            if ended[g]:
                continue
            theta = np.stack([s + oracle.logprobs([*prompt, *ids]) for s, ids in live[g]])
            theta = theta - strength * used
            order = np.dstack(np.unravel_index(np.argsort(-theta, axis=None), theta.shape))[0]
            made_now = [(float(theta[b, t]), [*live[g][b][1], int(t)]) for b, t in order]
            stops = [ids[-1] in ends or length == most for _, ids in made_now]
            finished[g] += [
                (score / length**exponent, ids)
                for (score, ids), stop in zip(made_now[:width], stops)
                if stop
            ]
            finished[g] = sorted(finished[g], key=lambda each: -each[0])[:width]
            live[g] = [each for each, stop in zip(made_now, stops) if not stop][:width]
            for _, ids in live[g]:
                used[ids[-1]] += 1
            if len(finished[g]) == width and live[g]:
                reach = most if made["early_stopping"] == "never" else length
                attainable = live[g][0][0] / reach**exponent
                early = made["early_stopping"] is True
                ended[g] = early or finished[g][-1][0] >= attainable
            ended[g] = ended[g] or not live[g]
    every = sorted((each for found in finished for each in found), key=lambda each: -each[0])
    return [(ids, score) for score, ids in every][: made["beams"]]


GROUPS = [(4, 2), (6, 3), (4, 4), (7, 7), (6, 2)]


def diverse_case(seed: int) -> tuple[dict[str, Any], int, float]:
    beams, groups = GROUPS[seed % len(GROUPS)]
    return {**case(seed), "beams": beams}, groups, (0.3, 1.5)[seed % 2]


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(10))
def test_groups_are_diverse_as_in_the_paper(oracle, seed):
    made, groups, strength = diverse_case(seed)
    rules = rules_of(made, oracle, groups=groups, diversity_penalty=strength)
    want = diverse(oracle, made, groups, strength)
    (found,) = search(oracle, (rules, made["prompt"]))
    check(found, want)


@pytest.mark.parity
def test_searches_that_advance_together_find_what_each_finds_alone(oracle):
    """Of all widths, rules and groups; some end before others, and some in a forced token."""
    searches = []
    for seed in range(CASES):
        made, groups, strength = diverse_case(seed)
        more: dict[str, Any] = {"groups": groups, "diversity_penalty": strength}
        if seed % 3:
            made, more = case(seed), {}
        stop, forced = tuple(range(seed, 60, 3)), 3 if seed % 4 == 0 else None
        more |= {"stop_ids": stop, "min_tokens": seed % 5, "forced_eos_id": forced}
        searches.append((rules_of(made, oracle, **more), made["prompt"]))
    assert search(oracle, *searches) == [search(oracle, each)[0] for each in searches]


# ------------------------------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny.write_llama(tmp_path_factory.mktemp("beams") / "tiny.gguf", weights())
    return graphllm.load(path, device="cpu", kv_type="f32", max_sequences=8, strict=True)


def answers(completion) -> list[tuple[list[int], float]]:
    return [(each.ids, each.score) for each in (completion, *completion.alternatives)]


def without_ends(found: list[tuple[list[int], float]], ends: list[int]):
    return [(ids[:-1] if ids[-1] in ends else ids, score) for ids, score in found]


def generate(llm, monkeypatch, made: dict[str, Any], ends: list[int], **more: Any):
    monkeypatch.setattr(llm.tokenizer, "eog_ids", frozenset(ends))
    names = ("beams", "length_penalty", "early_stopping")
    own = {name: made[name] for name in names} | {"n": made["beams"]} | more
    return llm.generate(made["prompt"], max_tokens=made["most"], **own)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(CASES))
def test_the_engine_finds_what_transformers_finds(llm, oracle, monkeypatch, seed):
    made = case(seed)
    ends = oracle.end_ids(made)
    if made["beams"] == 1:  # in both, greedy decoding
        monkeypatch.setattr(llm.tokenizer, "eog_ids", frozenset(ends))
        found = llm.generate(made["prompt"], max_tokens=made["most"], temperature=0)
        assert found.ids == oracle.greedy(made) and found.score is None
        return
    found = generate(llm, monkeypatch, made, ends)
    check(answers(found), without_ends(oracle.generate(made), ends))
    assert set(llm.engine.manager.held.values()) == {0}


@pytest.mark.parity
@pytest.mark.parametrize("seed", [2, 5])
def test_the_engine_finds_diverse_groups(llm, oracle, monkeypatch, seed):
    made, groups, strength = diverse_case(seed)
    ends = oracle.end_ids(made)
    more = {"beam_groups": groups, "diversity_penalty": strength}
    found = generate(llm, monkeypatch, made, ends, **more)
    check(answers(found), without_ends(diverse(oracle, made, groups, strength), ends))


@pytest.mark.parity
@pytest.mark.parametrize("processor", ["banned", "biased", "least", "no end"])
def test_biases_do_not_normalise_again_as_in_transformers(llm, oracle, monkeypatch, processor):
    made = {**case(5), "most": 8, "ends": 30, "early_stopping": True, "length_penalty": 0.6}
    ends = oracle.end_ids(made)
    likely = np.argsort(-oracle.logprobs(made["prompt"])).tolist()
    plain = [token for token in likely if token not in ends]
    own, hf = {
        "banned": ({"banned_ids": likely[:2]}, {"suppress_tokens": likely[:2]}),
        "biased": (
            {"logit_bias": {plain[0]: -1.5, plain[3]: 3.0}},
            {"sequence_bias": {(plain[0],): -1.5, (plain[3],): 3.0}},
        ),
        "least": ({"min_tokens": 6}, {"min_new_tokens": 6}),
        "no end": ({"ignore_eos": True}, {"min_new_tokens": 8}),
    }[processor]
    want = without_ends(oracle.generate(made, **hf), ends)
    assert want != without_ends(oracle.generate(made), ends)
    check(answers(generate(llm, monkeypatch, made, ends, **own)), want)


def test_the_answers_of_a_search(llm, monkeypatch):
    """Aliases, n, finish reasons, text; stop ids end a hypothesis as EOS ids do."""
    made = {**case(2), "most": 6}
    every = generate(llm, monkeypatch, made, [])
    assert len(every.choices) == 4 and {each.finish_reason for each in every.choices} == {"length"}
    assert [len(each.ids) for each in every.choices] == [6] * 4
    assert every.score == max(each.score for each in every.choices)
    assert every.text == llm.tokenizer.decode(every.ids) and every.as_dict()["score"] == every.score
    few = llm.generate(made["prompt"], max_tokens=6, num_beams=4, num_return_sequences=2)
    assert len(few.choices) == 2
    last = every.ids[2]
    stopped = [
        generate(llm, monkeypatch, made, ends, stop_ids=stop, length_penalty=-1)
        for ends, stop in (([last], []), ([], [last]))
    ]
    assert answers(stopped[0]) == answers(stopped[1])
    assert "stop" in {each.finish_reason for each in stopped[0].choices}
    assert all(last not in each.ids for each in stopped[0].choices)
    assert llm.submit(made["prompt"], max_tokens=6, beams=4, n=4).result().choices[3].ids
    assert llm.generate(made["prompt"], max_tokens=0, beams=4).ids == []
    own = {name: made[name] for name in ("beams", "length_penalty", "early_stopping")}
    awaited = graphllm.AsyncLLM(llm).generate(made["prompt"], max_tokens=6, n=3, **own)
    assert answers(asyncio.run(awaited)) == answers(every)[:3]


def test_fewer_possible_tokens_than_beams(llm, monkeypatch):
    found = llm.generate([5, 6], max_tokens=1, beams=7, n=7, allowed_ids=[10, 11, 12])
    assert sorted(each.ids for each in found.choices) == [[10], [11], [12]]
    found = llm.generate([5, 6], max_tokens=2, beams=7, n=7, allowed_ids=[10, 11, 12])
    assert len({tuple(each.ids) for each in found.choices}) == 7
    monkeypatch.setattr(llm.tokenizer, "eog_ids", frozenset([10]))
    with pytest.raises(RequestError, match="all ids are excluded"):
        llm.generate([5, 6], max_tokens=2, beams=2, allowed_ids=[10], min_tokens=1)


def test_a_search_ends_with_the_context(llm):
    found = llm.generate([7] * 122, beams=3, ignore_eos=True)
    assert len(found.ids) == 7 and "context of 128" in found.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beams": 4, "temperature": 0.8}, "temperature = 0.8 must be left out: beam search"),
        ({"beams": 4, "top_k": 5}, "top_k = 5 must be left out"),
        ({"sampling": graphllm.Sampling(repeat_penalty=1.1), "beams": 4}, "repeat_penalty = 1.1"),
        ({"beams": 4, "stop": "x"}, "stop = "),
        ({"beams": 4, "logprobs": 2}, "logprobs = 2"),
        ({"beams": 4, "processors": [lambda ids, logits: logits]}, "processors = "),
        ({"beams": 4, "n": 5}, "n = 5 must be at most the number of beams, 4"),
        (
            {"beams": 4, "beam_groups": 3, "diversity_penalty": 1},
            "a divisor of the number of beams",
        ),
        ({"beams": 4, "beam_groups": 2}, "diversity_penalty = 0 with beam_groups = 2"),
        ({"beams": 4, "diversity_penalty": 1}, "diversity_penalty = 1 with beam_groups = 1"),
        ({"beams": 33}, "beams = 33 must be in 1..32"),
        ({"length_penalty": 0.5}, "length_penalty = 0.5 must be left out without beams"),
        ({"beams": 4, "early_stopping": "ever"}, 'must be True, False or "never"'),
        ({"beams": 32, "stop_ids": range(40)}, "needs 7. candidates for each token; at most 64"),
    ],
)
def test_arguments_that_make_no_search(llm, arguments, message):
    before = llm.engine.batcher.steps
    with pytest.raises(RequestError, match=message):
        llm.generate([5, 6], **arguments)
    assert llm.engine.batcher.steps == before


def test_a_search_is_not_streamed(llm):
    with pytest.raises(RequestError, match=r"llm\.stream cannot yield a beam search"):
        llm.stream("hello", beams=4)
    assert "".join(llm.submit("hello", beams=2, max_tokens=4)) != ""


def test_a_cancelled_search_returns_its_blocks(llm):
    handle = llm.submit([5, 6, 7], beams=4, max_tokens=100, ignore_eos=True)
    while not handle.progress.tokens:
        pass
    handle.cancel()
    assert handle.result().finish_reason == "cancelled"
    with llm.engine.lock.hold("a test"):
        llm.engine.settle()
    assert set(llm.engine.manager.held.values()) == {0} and not llm.engine.batcher.generations
    assert llm.engine.scheduler.running == llm.engine.scheduler.waiting == 0
