"""Endpoints of llama.cpp's server: completions, infill, templates, properties, slots."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..engine.completion import Completion
from ..engine.request import Sampling
from ..errors import GraphllmError
from ..tokenizer import Tokenizer
from ..version import __version__
from .answers import Answer, Object, Piece, matched_stop
from .completions import Completions, Job
from .errors import ApiError
from .fields import sampling_settings, setting_names
from .json_data import json_response
from .llama_fields import APPLY_TEMPLATE, INFILL, NATIVE

_SHOWN = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty",
          "presence_penalty", "frequency_penalty")  # fmt: skip
_STOPS = {"length": "limit", "stop": "eos"}  # stop_type by finish_reason


class LlamaEndpoints:
    """The endpoints of one model; ``completions`` generates the answers."""

    def __init__(self, completions: Completions) -> None:
        self._completions, self._llm = completions, completions.llm

    async def completion(self, request: Request) -> ASGIApp:
        """``/completion``."""
        values = await self._completions.read(request, NATIVE, "prompt")
        prompts = values["prompt"]
        if len(prompts) > 1:
            raise ApiError(400, "prompt: several prompts need /v1/completions", "prompt")
        return await self._run(request, values, prompts[0], "prompt")

    async def infill(self, request: Request) -> ASGIApp:
        """``/infill``."""
        values = await self._completions.read(request, INFILL, "input_prefix", "input_suffix")
        ids = await asyncio.to_thread(self._infill, values)
        return await self._run(request, values, ids, "input_prefix")

    def _infill(self, values: dict[str, Any]) -> list[int]:
        """Return the prompt of ``/infill``. ApiError: the model cannot fill in text."""
        infill = self._completions.infill_prompts
        after = infill.after(values["input_suffix"])
        files, middle = values.get("input_extra", ()), values.get("prompt", "")
        return infill.encode(values["input_prefix"], after, files, middle)

    async def _run(
        self, request: Request, values: dict[str, Any], prompt: str | list[int], field: str
    ) -> ASGIApp:
        """Return the response to a checked request; ``field`` has its prompt."""
        own = self._completions
        settings = {"max_tokens": self._llm.limits.context, **sampling_settings(INFILL, values)}
        if settings["max_tokens"] < 0:
            settings["max_tokens"] = self._llm.limits.context
        stops, tokens = values.get("stop", ()), values.get("return_tokens", False)
        answer = NativeAnswer(own.name, self._llm.tokenizer, stops, tokens)
        names = {**setting_names(INFILL, values), "prompt": field}
        return await own.run(
            request, Job([prompt], settings, answer, values.get("stream", False), names)
        )

    async def apply_template(self, request: Request) -> Response:
        """``/apply-template``: the text of a chat's prompt."""
        values = await self._completions.read(request, APPLY_TEMPLATE, "messages")
        more = {name: values[name] for name in ("add_generation_prompt",) if name in values}
        names = {"prompt": "messages"}
        return json_response({"prompt": await self._completions.render(values, names, **more)})

    async def props(self, request: Request) -> Response:
        """``/props``: what the server runs."""
        llm, sampling = self._llm, Sampling()
        params: Object = {name: getattr(sampling, name) for name in _SHOWN}
        tokens = {"bos_token": llm.tokenizer.bos_id, "eos_token": llm.tokenizer.eos_id}
        shown = {
            name: "" if token is None else llm.tokenizer.piece(token).decode("utf-8", "replace")
            for name, token in tokens.items()
        }
        return json_response({
            "default_generation_settings": {
                "n_ctx": llm.limits.context,
                "params": {**params, "seed": -1, "n_predict": -1},
            },
            "total_slots": llm.limits.sequences,
            "model_alias": self._completions.name,
            "chat_template": self._template(),
            "modalities": {"vision": False, "audio": False},
            **shown,
            "build_info": f"graphllm {__version__}",
        })  # fmt: skip

    def _template(self) -> str:
        """Return the source of the chat template; empty if the model has none."""
        try:
            return self._llm.template.source
        except GraphllmError:
            return ""

    async def slots(self, request: Request) -> Response:
        """``/slots``: the sequences that can be computed at once.

        With ``fail_on_no_slot``, the status is 503 if all are in use.
        """
        running, count = self._llm.engine.scheduler.running, self._llm.limits.sequences
        if "fail_on_no_slot" in request.query_params and running >= count:
            raise ApiError(503, "no slot is available", code="server_overloaded")
        length = self._llm.limits.context
        slots = [{"id": i, "n_ctx": length, "is_processing": i < running} for i in range(count)]
        return json_response(slots)


class NativeAnswer(Answer):
    """As `Answer`, of llama.cpp's ``/completion``."""

    last = b""

    def __init__(
        self, model: str, tokenizer: Tokenizer, stops: Sequence[str], tokens: bool
    ) -> None:
        """Begin an answer of ``model``.

        Args:
            model: name of the model in the API.
            tokenizer: its tokenizer.
            stops: the stop strings of the request.
            tokens: whether the answer has its token ids.
        """
        super().__init__(model, tokenizer)
        self._stops, self._tokens = stops, tokens

    def whole(self, prompts: Sequence[Completion]) -> Object:
        (done,) = prompts
        return self._end(done, done.text)

    def begin(self, prompts: Sequence[Completion], samples: int) -> Iterator[Object]:
        yield from ()

    def pieces(self, new: Sequence[Piece]) -> Iterator[Object]:
        for _, text, _ in new:
            yield {"index": 0, "content": text, "stop": False}

    def encoded(self, new: Sequence[Piece]) -> bytes:
        return b"".join(map(self.frame, self.pieces(new)))

    def ended(self, index: int, finish: str) -> Iterator[Object]:
        yield from ()

    def finish(self, prompts: Sequence[Completion]) -> Iterator[Object]:
        yield self._end(prompts[0], "")

    def _end(self, done: Completion, text: str) -> Object:
        """Return the last event, or the whole answer with its text."""
        stop = matched_stop(self.tokenizer, done, self._stops)
        cached = done.cached_tokens
        return {
            "index": 0,
            "content": text,
            "tokens": list(done.ids) if self._tokens else [],
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(done.ids),
            "tokens_evaluated": len(done.prompt_ids),
            "tokens_cached": cached,
            "truncated": False,
            "has_new_line": "\n" in done.text,
            "stop_type": "word" if stop is not None else _STOPS.get(done.finish_reason, "none"),
            "stopping_word": stop or "",
            "timings": _timings(done),
        }


def _timings(done: Completion) -> Object:
    """Return the times of an answer, in milliseconds."""
    known = done.timings
    prompt, predicted = known.prefill_tokens, len(done.ids)
    return {
        "cache_n": done.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": 1e3 * known.prefill_s,
        "prompt_per_second": prompt / known.prefill_s if known.prefill_s else 0.0,
        "predicted_n": predicted,
        "predicted_ms": 1e3 * known.decode_s,
        "predicted_per_second": known.decode_tokens / known.decode_s if known.decode_s else 0.0,
    }
