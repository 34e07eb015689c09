"""Sampling options of the verbs that generate text."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import RequestError
from .declarations import Option
from .options import read_text

if TYPE_CHECKING:
    from ..engine.request import Sampling


def _repeatable(*flags: str, help: str) -> Any:
    """Return an option that may be given several times."""
    return Option(*flags, help=f"{help}; may be repeated.", show_default=False)


@dataclass
class SamplingOptions:
    """Sampling options and stop conditions; the fields are those of `Sampling`."""

    max_tokens: Annotated[
        int,
        Option(
            "-n",
            "--max-tokens",
            "--n-predict",
            "--max-new-tokens",
            help="Number of tokens to generate.",
        ),
    ] = 128
    seed: Annotated[
        int | None,
        Option("-s", "--seed", help="Seed of the random numbers; random by default."),
    ] = None
    temperature: Annotated[
        float,
        Option("--temp", "--temperature", help="Temperature; 0 takes the most likely token."),
    ] = 0.8
    top_k: Annotated[int, Option("--top-k", help="Top-k sampling; 0 disables it.")] = 40
    top_p: Annotated[float, Option("--top-p", help="Top-p sampling; 1 disables it.")] = 0.95
    min_p: Annotated[float, Option("--min-p", help="Min-p sampling; 0 disables it.")] = 0.0
    typical_p: Annotated[
        float,
        Option("--typical", "--typical-p", help="Typical sampling; 1 disables it."),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Option("--top-n-sigma", "--top-nsigma", help="Top-n-sigma sampling; 0 disables it."),
    ] = 0.0
    xtc_probability: Annotated[
        float,
        Option("--xtc-probability", help="Probability of XTC; 0 disables it."),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        Option("--xtc-threshold", help="Minimum probability of the tokens that XTC may exclude."),
    ] = 0.1
    repeat_penalty: Annotated[
        float,
        Option(
            "--repeat-penalty",
            "--repetition-penalty",
            help="Repeat penalty on the last tokens; 1 disables it.",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, Option("--presence-penalty", help="Presence penalty; 0 disables it.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option("--frequency-penalty", help="Frequency penalty; 0 disables it.")
    ] = 0.0
    penalty_last_n: Annotated[
        int,
        Option(
            "--repeat-last-n",
            "--penalty-last-n",
            help="Number of last tokens that the penalties consider; -1 means 1024.",
        ),
    ] = 64
    dry_multiplier: Annotated[
        float,
        Option(
            "--dry-multiplier",
            help="Strength of the DRY penalty on repetitions; 0 disables it.",
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        Option("--dry-base", help="Base of the DRY penalty."),
    ] = 1.75
    dry_allowed_length: Annotated[
        int,
        Option(
            "--dry-allowed-length",
            help="Length from which on DRY penalises repetitions.",
        ),
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        Option(
            "--dry-penalty-last-n",
            help="Number of last tokens that DRY considers; -1 means 1024.",
        ),
    ] = -1
    dry_breaker_ids: Annotated[
        list[int] | None, _repeatable("--dry-breaker-id", help="Token id that ends a repetition")
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _repeatable("--logit-bias", help="Bias of a token, as ID=BIAS; -inf bans it"),
    ] = None
    banned_ids: Annotated[
        list[int] | None, _repeatable("--banned-id", help="Token id that is never sampled")
    ] = None
    allowed_ids: Annotated[
        list[int] | None, _repeatable("--allowed-id", help="Sample only tokens with this id")
    ] = None
    stop: Annotated[
        list[str] | None, _repeatable("--stop", "--stop-strings", help="Stop string")
    ] = None
    stop_ids: Annotated[
        list[int] | None, _repeatable("--stop-id", "--stop-token-ids", help="Stop token id")
    ] = None
    min_tokens: Annotated[
        int,
        Option("--min-tokens", "--min-new-tokens", help="Minimum number of tokens to generate."),
    ] = 0
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Never sample an EOS token.")] = False

    def sampling(self) -> Sampling:
        """Return the sampling settings. RequestError: a value is out of range."""
        from ..engine.request import Sampling

        own = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in _LISTS & own.keys():
            own[name] = tuple(own[name] or ())
        if isinstance(early := own.get("early_stopping"), str):
            own["early_stopping"] = {"true": True, "false": False}.get(early, early)
        own["logit_bias"] = dict(map(_bias, self.logit_bias or ()))
        return Sampling(**own).normalize()


_LISTS = {"stop", "stop_ids", "dry_breaker_ids", "banned_ids", "allowed_ids", "forced_ids"}


def _bias(text: str) -> tuple[int, float]:
    """Return the token id and the bias of an argument of ``--logit-bias``."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise RequestError(f"logit_bias = {text!r} must be ID=BIAS", "logit_bias") from None


@dataclass
class RunSamplingOptions(SamplingOptions):
    """Sampling options of ``run``, which can show several answers and log-probabilities."""

    n: Annotated[int, Option("--n", help="Number of samples of each prompt.")] = 1
    logprobs: Annotated[
        int | None,
        Option(
            "--logprobs",
            help="Output the log-probability of each sampled token and of this many of the most "
            "likely ones; needs JSON output.",
            show_default=False,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Option(
            "--prompt-logprobs",
            help="As --logprobs, for the tokens of the prompt.",
            show_default=False,
        ),
    ] = None
    beams: Annotated[
        int, Option("--beams", "--num-beams", help="Beams of a beam search; 1 samples.")
    ] = 1
    length_penalty: Annotated[
        float,
        Option("--length-penalty", help="Exponent of the length in the scores of beams."),
    ] = 1.0
    early_stopping: Annotated[
        str,
        Option(
            "--early-stopping",
            help="When a beam search that has found enough sequences ends. true: at once; false: "
            "when no beam scores better now; never: when no beam can become better.",
        ),
    ] = "false"
    beam_groups: Annotated[
        int,
        Option(
            "--beam-groups",
            "--num-beam-groups",
            help="Groups of a diverse beam search; they divide the beams evenly.",
        ),
    ] = 1
    diversity_penalty: Annotated[
        float,
        Option(
            "--diversity-penalty",
            help="Penalty on a token for each beam of an earlier group that has it.",
        ),
    ] = 0.0
    forced_ids: Annotated[
        list[int] | None,
        _repeatable("--forced-id", help="Token id that the answer begins with"),
    ] = None
    json_schema: Annotated[
        str | None,
        Option("--json-schema", help="JSON schema that the answer matches: JSON text, or a file."),
    ] = None
    regex: Annotated[
        str | None, Option("--regex", help="Regular expression that the whole answer matches.")
    ] = None
    grammar: Annotated[
        str | None,
        Option("--grammar", help="Lark grammar that the answer matches: its text, or a file."),
    ] = None
    source_lang: Annotated[
        str | None,
        Option("--source-lang", help="Language code of the source (translation models)."),
    ] = None
    target_lang: Annotated[
        str | None,
        Option("--target-lang", help="Language code of the answer (translation models)."),
    ] = None
    profile: Annotated[
        bool, Option("--bill", help="Show what the request cost: time, bytes and FLOPs by op.")
    ] = False

    def sampling(self) -> Sampling:
        """Return the sampling settings; see `SamplingOptions.sampling`."""
        schema, grammar = self.json_schema, self.grammar
        if schema is not None and not schema.lstrip().startswith("{"):
            self.json_schema = read_text(Path(schema))
        if grammar is not None and ":" not in grammar:  # every grammar has a rule "start: ..."
            self.grammar = read_text(Path(grammar))
        return super().sampling()


@dataclass
class ChatSamplingOptions(SamplingOptions):
    """Sampling options of ``chat``, whose answers may be longer by default."""

    max_tokens: Annotated[
        int,
        Option(
            "-n",
            "--max-tokens",
            "--n-predict",
            "--max-new-tokens",
            help="Maximum number of tokens of an answer.",
        ),
    ] = 1024
