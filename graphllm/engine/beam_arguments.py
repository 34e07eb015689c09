"""Rules of the arguments of beam search: their values, and what they can be combined with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..arguments import Integer, Real, Rule, flag, invalid_argument
from ..errors import RequestError
from .beam_search import NEVER

MAX_BEAMS = 32

# What beam search replaces or cannot honour, with the value without effect.
_WITHOUT_EFFECT: dict[str, Any] = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0,
    "top_n_sigma": 0.0, "xtc_probability": 0.0, "repeat_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "dry_multiplier": 0.0, "stop": (), "logprobs": None,
    "prompt_logprobs": None, "processors": (), "forced_ids": (),
    "json_schema": None, "regex": None, "grammar": None,
}  # fmt: skip
_ONLY_WITH_BEAMS = ("length_penalty", "early_stopping", "beam_groups", "diversity_penalty")


def early_stopping(name: str, value: Any) -> bool | str:
    """Rule: True, False or "never"."""
    if isinstance(value, str) and value == NEVER:
        return NEVER
    try:
        return flag(name, value)
    except RequestError:
        raise invalid_argument(name, value, f'True, False or "{NEVER}"') from None


BEAM_RULES: dict[str, Rule] = {
    "beams": Integer(1, MAX_BEAMS),
    "length_penalty": Real(),
    "early_stopping": early_stopping,
    "beam_groups": Integer(1, MAX_BEAMS),
    "diversity_penalty": Real(0),
}


def check_beams(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], given: Collection[str] = ()
) -> None:
    """Raise RequestError unless the settings make one kind of search.

    Args:
        settings: all settings by name, each valid by itself.
        defaults: their defaults.
        given: names of the settings that were given as arguments; the others count as given unless
            they have their default.
    """
    beams, groups = settings["beams"], settings["beam_groups"]

    def changed(name: str) -> bool:
        return settings[name] != defaults[name]

    if beams == 1:
        for name in filter(changed, _ONLY_WITH_BEAMS):
            raise invalid_argument(name, settings[name], "left out without beams (beams = 1)")
        return
    for name, neutral in _WITHOUT_EFFECT.items():
        if settings[name] != neutral and (name in given or changed(name)):
            raise invalid_argument(
                name, settings[name], f"left out: beam search (beams = {beams}) has no use for it"
            )
    if settings["n"] > beams:
        raise invalid_argument("n", settings["n"], f"at most the number of beams, {beams}")
    if beams % groups:
        raise invalid_argument("beam_groups", groups, f"a divisor of the number of beams, {beams}")
    if (groups > 1) != (settings["diversity_penalty"] > 0):
        raise RequestError(
            f"diversity_penalty = {settings['diversity_penalty']:g} with beam_groups = {groups}: "
            "give both, since groups without a penalty are equal",
            "diversity_penalty",
        )
