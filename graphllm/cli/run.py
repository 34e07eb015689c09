"""The verb ``run``: generate from one or more prompts."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from ..progress import progress_line
from ..system_info import peak_bytes
from ..terminal import note
from .declarations import Option, verb
from .options import AsJson, GenerationLoadOptions, Model, System, Template, read_text
from .output import show_json, write_text
from .sampling_options import RunSamplingOptions

if TYPE_CHECKING:
    from ..api import LLM
    from ..engine.completion import Completion
    from ..engine.request import Sampling

PARALLEL = 16  # requests that run at once, by default

Prompts = Annotated[
    list[str] | None,
    Option(
        "-p",
        "--prompt",
        help="Prompt; may be repeated; - reads it from standard input.",
        show_default=False,
    ),
]
PromptPath = Annotated[
    Path | None,
    Option(
        "-f",
        "--file",
        help="File that contains the prompt; NAME.jsonl has one request per line, in JSON.",
    ),
]

Output = Annotated[
    Path | None,
    Option(
        "-o", "--output", help="File for the answers to NAME.jsonl; answers that it has are kept."
    ),
]
Parallel = Annotated[
    int | None,
    Option(
        "--parallel",
        help="Number of requests of NAME.jsonl that run at once; 16 by default.",
        show_default=False,
    ),
]


@verb
def run(
    model: Model,
    options: RunSamplingOptions,
    load_options: GenerationLoadOptions,
    prompt: Prompts = None,
    file: PromptPath = None,
    chat: Annotated[bool, Option("--chat", help="Apply the chat template to the prompt.")] = False,
    chat_template: Template = None,
    system: System = None,
    as_json: AsJson = False,
    output: Output = None,
    parallel: Parallel = None,
) -> None:
    """Generate text from one or more prompts.

    graphllm run demo -p "The capital of France is" -n 32 --temp 0

    graphllm run model.gguf -f question.txt --chat --json

    graphllm run model.gguf -f prompts.jsonl -o answers.jsonl

    graphllm run DIRECTORY -p "Where is the station?" --target-lang fra_Latn --beams 4
    """
    if file is not None and not prompt and file.suffix.lower() == ".jsonl":
        from .batch_run import run_batch
        from .prompt_lines import PromptFile

        defaults = replace(options.sampling(), seed=options.seed)
        if chat:
            from ..chat import PROCESS

            PROCESS.start()  # while the model loads
        most = PARALLEL if parallel is None else parallel
        load = partial(load_options.load, model, chat_template=chat_template, max_sequences=most)
        run_batch(PromptFile(file, defaults, chat, system), output, most, load, _check_length)
        return
    if output is not None or parallel is not None:
        raise RequestError("-o and --parallel need -f NAME.jsonl")
    if not chat and (chat_template is not None or system is not None):
        raise RequestError("--chat-template and --system need --chat")
    if not as_json and (options.logprobs is not None or options.prompt_logprobs is not None):
        raise RequestError("--logprobs and --prompt-logprobs need --json or -f NAME.jsonl")
    texts = _prompts(prompt, file)
    sampling = options.sampling()
    if chat:
        from ..chat import PROCESS

        PROCESS.start()  # while the model loads
    llm = load_options.load(
        model,
        chat_template=chat_template,
        max_sequences=max(min(sampling.n, PARALLEL), sampling.beams),
    )
    _ = llm.tokenizer  # raises if there is none, before anything is printed
    if not chat and sys.stderr.isatty() and llm.has_template:
        note("note: the model has a chat template; `graphllm chat` and `run --chat` apply it")
    asked = [
        _chat_ids(llm, text, system) if chat else llm.encode_prompt(text, sampling)
        for text in texts
    ]
    llm.check_ids(sampling.token_ids)
    for ids in asked:
        _check_length(llm, ids)
    for text, ids in zip(texts, asked):
        shown = "" if chat or llm.seq2seq else text  # a source is not a part of the answer
        _generate(llm, ids, shown, sampling, options.seed, as_json)


def _check_length(llm: LLM, ids: str | list[int]) -> None:
    """Raise RequestError if a prompt does not fit the context, before any of it is printed."""
    most = llm.limits.context
    if not isinstance(ids, str) and len(ids) > most:
        own = llm.decoder.cfg.context
        text = f"the prompt has {len(ids)} tokens, the context holds {most}"
        if most < own:
            raise RequestError(text, "context")
        raise RequestError(f"{text}, the model's maximum")


def _prompts(texts: list[str] | None, file: Path | None) -> list[str]:
    """Return the prompts of -p, -f or standard input. RequestError: none or both are given."""
    if texts and file is not None:
        raise RequestError("give -p or -f, not both")
    if file is not None:
        return [read_text(file)]
    if not texts:
        raise RequestError("give a prompt with -p TEXT, -p - or -f FILE")
    return [read_text(None) if text == "-" else _check_utf8(text) for text in texts]


def _check_utf8(text: str) -> str:
    """Return the argument. RequestError: it was not UTF-8 (Python decodes it to surrogates)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"-p: character {error.start} is not valid UTF-8") from None
    return text


def _chat_ids(llm: LLM, text: str, system: str | None) -> list[int]:
    """Return the token ids of a chat with the user message ``text``."""
    before = [{"role": "system", "content": system}] if system is not None else []
    return llm.encode_chat([*before, {"role": "user", "content": text}])


def _generate(
    llm: LLM,
    prompt: str | list[int],
    shown: str,
    sampling: Sampling,
    seed: int | None,
    as_json: bool,
) -> None:
    """Generate from one prompt; print ``shown``, then the generated text as it is sampled."""
    from ..engine.completion import Completion

    done = Completion()
    if sampling.n > 1 or sampling.beams > 1:
        done = llm.generate(prompt, sampling=sampling)
    else:
        if not as_json:
            write_text(shown)
        with progress_line("prefill") as progress:
            pieces = llm.complete(prompt, sampling, done, partial(progress, "prefill"))
            first = next(pieces, "")
        for piece in itertools.chain([first], pieces):
            if not as_json:
                write_text(piece)
    if as_json:
        show_json(
            {**done.as_dict(), **_placement(llm), "peak_memory_bytes": peak_bytes()}, ascii=False
        )
        return
    if sampling.n > 1 or sampling.beams > 1:
        write_text("\n".join(shown + each.text for each in done.choices))
    write_text("\n")
    if done.bill is not None:
        for line in done.bill.table().splitlines():
            note(line)
    _print_notes(llm, done, seed)


def _placement(llm: LLM) -> dict[str, Any]:
    """Return the placement for ``--json``."""
    ops = llm.placement()
    return {
        "device": llm.device,
        "placement": {backend: sum(counts.values()) for backend, counts in ops.items()},
        "ops": ops,
        "gpu_layers": llm.gpu_offload.as_dict() if llm.gpu_offload else None,
        "fallbacks": llm.misses(),
    }


def _drafts(done: Completion) -> str:
    """Return how many draft tokens were accepted, if any were computed."""
    t = done.timings
    return (
        f", {t.accepted_tokens} of {t.drafted_tokens} drafts accepted" if t.drafted_tokens else ""
    )


def _memory() -> str:
    """Return the peak of this process's memory, if it is known."""
    nbytes = peak_bytes()
    return f", peak memory {nbytes / 1e6:.0f} MB" if nbytes else ""


def _print_notes(llm: LLM, done: Completion, seed: int | None) -> None:
    """Print notes after a run: on a terminal timings and the chosen seed; always the misses."""
    if sys.stderr.isatty():
        t = done.timings.as_dict()
        seed_text = f", seed {done.seed}" if seed is None else ""
        note(
            f"[{len(done.prompt_ids)} + {len(done.ids)} tokens, load {t['load_s']:.2f} s, first "
            f"token {t['ttft_s']:.2f} s, {t['decode_tok_s']:.1f} tok/s{_drafts(done)}"
            f"{_memory()}{seed_text}]"
        )
    for line in [*done.notes, *llm.misses()]:
        note(f"note: {line}")
