"""The official JSON Schema Test Suite: does generated JSON match every schema that is supported?

    pip install 'graphllm[structured,demo]' jsonschema
    pip download --no-deps --no-binary :all: jsonschema && tar xzf jsonschema-*.tar.gz
    python benchmarks/json_schema_suite.py jsonschema-*/json/tests/draft2020-12

The suite is in the source package of `jsonschema`. For each schema, ``-s`` answers are sampled, and
each complete one is checked by `jsonschema`. Then every instance of the suite that does not match
its schema must be refused by the grammar. Schemas that llguidance does not support are counted with
their reasons. The exit code is 1 if an answer does not match, or an instance is accepted wrongly.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema

import graphllm
from graphllm.engine.grammar import GrammarState, start_grammar
from graphllm.errors import RequestError

PROMPT = "Answer with JSON:\n"


@dataclass
class Counts:
    """Results of one file of the suite, or of all."""

    schemas: int = 0
    refused: int = 0
    complete: int = 0
    cut_off: int = 0
    rejected: int = 0  # instances that do not match, which the grammar refused, too
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def matches(schema: Any, answer: str) -> bool:
    """Whether a JSON text matches a schema, by the package `jsonschema`.

    Numbers are decimals: as floats, 1.386 is no multiple of 0.0001.
    """
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    value = json.loads(answer, parse_float=Decimal)
    return jsonschema.Draft202012Validator(exact).is_valid(value)


def accepts(state: GrammarState, llm: graphllm.LLM, text: str) -> bool:
    """Whether a whole text matches the grammar of a fresh state."""
    for token in llm.tokenizer.encode("\n" + text)[len(llm.tokenizer.encode("\n")) :]:
        if not state.matcher.try_consume_tokens([token]):
            return False
    return state.matcher.is_accepting()


def check(llm: graphllm.LLM, group: dict[str, Any], samples: int, tokens: int) -> Counts:
    """Check one schema of the suite with its instances. RequestError: it is not supported."""
    schema, found = group["schema"], Counts(1)
    settings = {"max_tokens": tokens, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 1}
    done = llm.generate(PROMPT, json_schema=schema, n=samples, **settings)
    for each in done.choices:
        if each.finish_reason == "length":
            found.cut_off += 1
        elif matches(schema, each.text):
            found.complete += 1
        else:
            found.wrong.append(f"{group['description']}: answer {each.text[:100]}")
    for case in group["tests"]:
        if not case["valid"]:
            state = start_grammar(
                {"json_schema": json.dumps(schema), "regex": None, "grammar": None,
                 "forced_ids": ()}, llm.tokenizer
            )  # fmt: skip
            if accepts(state, llm, json.dumps(case["data"])):
                found.wrong.append(f"{group['description']}: accepts {case['data']!r:.100}")
            else:
                found.rejected += 1
    return found


def check_file(
    llm: graphllm.LLM, path: Path, samples: int, tokens: int, reasons: Counter[str]
) -> Counts:
    """Check the schemas of one file."""
    total = Counts()
    for group in json.loads(path.read_text("utf-8")):
        try:
            total.add(check(llm, group, samples, tokens))
        except RequestError as error:
            total.add(Counts(schemas=1, refused=1))
            reasons[str(error).rpartition(": ")[2][:60]] += 1
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("suite", type=Path, help="Directory with the files of a draft.")
    parser.add_argument("-m", dest="model", default="demo")
    parser.add_argument("-s", dest="samples", type=int, default=8)
    parser.add_argument("-n", dest="tokens", type=int, default=64)
    parser.add_argument("-t", dest="threads", type=int, default=2)
    opts = parser.parse_args()
    files = sorted(opts.suite.glob("*.json"))
    if not files:
        raise SystemExit(f"error: {opts.suite} has no JSON files")
    total, reasons = Counts(), Counter[str]()
    print("file                          schemas refused | answers cut off | instances refused")
    with graphllm.load(
        opts.model, context=512, max_sequences=opts.samples, threads=opts.threads
    ) as llm:
        for path in files:
            own = check_file(llm, path, opts.samples, opts.tokens, reasons)
            total.add(own)
            print(_row(path.stem, own), flush=True)
    print(_row("all", total))
    print(*(f"refused {count:3} times: {why}" for why, count in reasons.most_common(16)), sep="\n")
    print(*(f"WRONG {each}" for each in total.wrong), sep="\n")
    sys.exit(bool(total.wrong))


def _row(name: str, own: Counts) -> str:
    return (
        f"{name:30}{own.schemas:7} {own.refused:7} | {own.complete:7} {own.cut_off:7} | "
        f"{own.rejected:7}  {'WRONG' if own.wrong else ''}"
    )


if __name__ == "__main__":
    main()
