"""Beam search: sequences and scores are those of transformers; groups those of the paper."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny

from graphllm.engine.beam_search import BeamSearch, Candidates, best, live_tokens

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


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


def search(rules: BeamSearch, oracle: Oracle, prompt: list[int]) -> list[tuple[list[int], float]]:
    """Return what the search finds with no more candidates than it asks for."""
    state = rules.start()
    while live := live_tokens(state):
        found = {}
        for tokens in live:
            logprobs = oracle.logprobs([*prompt, *tokens])
            ids = np.argsort(-logprobs, kind="stable")[: rules.candidates]
            found[tokens] = Candidates(ids, logprobs[ids])
        state = rules.advance(state, found)
    return [(list(each.tokens), each.score) for each in best(state, rules.beams)]


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
    check(search(rules_of(made, oracle), oracle, made["prompt"]), oracle.generate(made))


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
    check(search(rules, oracle, made["prompt"]), want)
