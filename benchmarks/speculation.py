"""Measure speculative decoding: tok/s with and without draft tokens, and whether the tokens agree.

    python benchmarks/speculation.py                                     # demo model, CPU
    python benchmarks/speculation.py model.gguf --device cuda --deterministic
    python benchmarks/speculation.py --random mistral-7b --type q4_k_m --device cuda

With a model file, three texts are continued with prompt look-up:

edit     Code and the beginning of the same code with other names, at temperature 0.
summary  A text and the beginning of its summary in quotes, at temperature 0.
story    The beginning of a story, at temperature 1: little is repeated.

The answer of a model with random weights repeats nothing. So with --random, a step predicts the
answer without drafts, and each prediction is right with a given probability (``right 0.9``): this
measures the steps that the host feeds, not the predictions. Since the answers must be the same,
CUDA is deterministic.
``look-up`` are the real predictions for such an answer, of which hardly any come true.

Answers with and without drafts are timed one after the other, in rounds; ``gain`` is the median of
the ratios of a round. ``tok/step``: tokens of a step with drafts, on average over all steps.
"""

from __future__ import annotations

import argparse
import inspect
import random
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import graphllm
from graphllm.api import LLM
from graphllm.checkpoints.random_weights import RandomCheckpoint
from graphllm.engine import speculation
from graphllm.engine.completion import Completion
from graphllm.engine.prompt_lookup import PromptLookup

STORY = "The old lighthouse had been dark for years when a light came on. Nobody in the village"
REPORT = """\
The city council voted on Tuesday to close the old bridge over the river from the first of May. \
Engineers had found cracks in two of its seven arches in January, and the repair of the northern \
arch alone will take at least nine months. Buses will cross the river on the railway bridge, which \
is two miles to the east. "We know what this means for the shops on both banks," the mayor said, \
"but we will not wait until somebody is hurt." The owners of the shops asked for a footbridge in \
the meantime. The council will decide about the footbridge in June, when the engineers have \
finished their report. The old bridge was built in 1874 and was last repaired after the flood of \
1953. About eleven thousand cars cross it every day."""
QUOTES = """What the report says, in its own words:

Closure: "The city council voted on Tuesday to close the old bridge over the river from the first \
of May."
Reason: "Engineers had found cracks in two of its seven arches in January, and the repair of the \
northern arch alone will take at least nine months."
Buses: "Buses"""
RIGHT = (0.95, 0.9, 0.8, 0.6)
Run = Callable[[bool], Completion]  # whether to speculate -> the answer


@dataclass
class Case:
    """An answer to time: its name, prompt and temperature, and what predicts its tokens."""

    name: str
    prompt: str | list[int]
    temperature: float
    predictions: type[PromptLookup] = PromptLookup


def texts() -> list[Case]:
    """Return the three texts."""
    code = inspect.getsource(textwrap.dedent)
    renamed = code.replace("dedent", "remove_indent")
    start = renamed[: renamed.index("(")]
    return [
        Case("edit", f"# textwrap.py\n{code}\n\n# The same, called remove_indent\n{start}", 0),
        Case("summary", f"{REPORT}\n\n{QUOTES}", 0),
        Case("story", STORY, 1),
    ]


def known(ids: Sequence[int], right: float) -> type[PromptLookup]:
    """Return predictions of the tokens ``ids``, each of which is right with this probability."""
    rng = random.Random(0)

    class Known(PromptLookup):
        def predict(self, count: int) -> tuple[int, ...]:
            at = len(self._tokens)
            return tuple(t if rng.random() < right else t ^ 1 for t in ids[at : at + count])

        def update(self) -> None:
            pass

        def rates(self, count: int) -> list[float]:
            return [right**n for n in range(1, min(count, len(ids) - len(self._tokens)) + 1)]

    return Known


def random_cases(llm: LLM, tokens: int, depth: int) -> list[Case]:
    """Return cases for random weights: known answers, and look-up in one."""
    rng = random.Random(1)
    prompt = [rng.randrange(llm.engine.vocab) for _ in range(depth)]
    ids = runner(llm, Case("", prompt, 1), tokens)(False).ids
    return [
        *(Case(f"right {p:g}", prompt, 1, known([*prompt, *ids], p)) for p in RIGHT),
        Case("look-up", prompt, 1),
    ]


def runner(llm: LLM, case: Case, tokens: int) -> Run:
    """Return a function that answers a case."""
    batcher = llm.engine.batcher
    chooses, device = batcher.speculation, batcher.device_drafts

    def run(speculate: bool) -> Completion:
        batcher.speculation = chooses if speculate else None
        if case.predictions is not PromptLookup:  # the device predicts by itself
            batcher.device_drafts = None
        speculation.PromptLookup = case.predictions  # type: ignore[misc]
        try:
            return llm.generate(
                case.prompt, temperature=case.temperature, seed=0, max_tokens=tokens,
                ignore_eos=True,
            )  # fmt: skip
        finally:
            batcher.speculation, batcher.device_drafts = chooses, device
            speculation.PromptLookup = PromptLookup  # type: ignore[misc]

    return run


def measure(llm: LLM, case: Case, tokens: int, rounds: int) -> str:
    """Return a line of the table."""
    run, rates, gains = runner(llm, case, tokens), list[tuple[float, float]](), list[float]()
    first, second = run(False), run(True)
    for _ in range(rounds):
        before = llm.engine.batcher.steps
        first, second = run(False), run(True)
        steps = llm.engine.batcher.steps - before - tokens
        found = [each.timings.decode_tokens / each.timings.decode_s for each in (first, second)]
        rates.append((found[0], found[1]))
        gains.append(found[1] / found[0])
    plain, drafts = (median(each) for each in zip(*rates))
    done = second.timings
    accepted = f"{done.accepted_tokens} / {done.drafted_tokens}"
    same = "same" if first.ids == second.ids else "differ"
    return (
        f"{case.name:<12} {plain:>9.1f} {drafts:>9.1f} {median(gains):>6.2f} "
        f"({min(gains):.2f}-{max(gains):.2f}) {tokens / steps:>8.2f} {accepted:>12}  {same}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--random", help="shape of a model with random weights")
    parser.add_argument("--type", default="q4_k_m", help="format of the random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--speculate", default="auto", help="see `graphllm run`")
    parser.add_argument("--depth", type=int, default=512, help="tokens of a random prompt")
    parser.add_argument("-n", "--tokens", type=int, default=100)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, default=0)
    given = parser.parse_args()
    model = RandomCheckpoint(given.random, given.type) if given.random else given.model
    deterministic = given.deterministic or given.random is not None
    llm = graphllm.load(
        model, device=given.device, deterministic=deterministic, threads=given.threads,
        max_sequences=1, speculate=given.speculate,
    )  # fmt: skip
    print(llm, "deterministic" if deterministic else "", "speculate", given.speculate)
    head = ("plain t/s", "drafts", "gain", "tok/step", "accepted")
    print(f"{'':<12} {head[0]:>9} {head[1]:>9} {head[2]:>6} {'':<11} {head[3]:>8} {head[4]:>12}")
    cases = random_cases(llm, given.tokens, given.depth) if given.random else texts()
    for case in cases:
        print(measure(llm, case, given.tokens, given.rounds), flush=True)


if __name__ == "__main__":
    main()
