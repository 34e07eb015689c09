"""Endpoints of llama.cpp's server: completions, infill, templates, properties, slots."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..errors import GraphllmError
from ..version import __version__
from .completions import Completions, Job
from .errors import ApiError
from .fields import sampling_settings, setting_names
from .json_data import json_response
from .llama_fields import APPLY_TEMPLATE, INFILL, NATIVE
from .native_answer import NativeAnswer, default_settings
from .prompt_parts import Parts, encode_parts, single_text


class LlamaEndpoints:
    """The endpoints of one model; ``completions`` generates the answers."""

    def __init__(self, completions: Completions) -> None:
        self._completions, self._llm = completions, completions.llm

    async def completion(self, request: Request) -> ASGIApp:
        """``/completion``."""
        values = await self._completions.read_prompts(request, NATIVE)
        prompts = await asyncio.to_thread(self._encoded, values["prompt"])
        return await self._run(request, values, prompts, "prompt")

    def _encoded(self, prompts: Sequence[Parts]) -> list[str | list[int]]:
        """Return prompts as texts, or as token ids if they have token ids."""
        made = list[str | list[int]]()
        for parts in prompts:
            text = single_text(parts)
            made.append(encode_parts(self._llm.tokenizer, parts) if text is None else text)
        return made

    async def infill(self, request: Request) -> ASGIApp:
        """``/infill``."""
        values = await self._completions.read(request, INFILL, "input_prefix", "input_suffix")
        ids = await asyncio.to_thread(self._infill, values)
        return await self._run(request, values, [ids], "input_prefix")

    def _infill(self, values: dict[str, Any]) -> list[int]:
        """Return the prompt of ``/infill``. ApiError: the model cannot fill in text."""
        infill = self._completions.infill_prompts
        after = infill.after(values["input_suffix"])
        files, middle = values.get("input_extra", ()), values.get("prompt", "")
        return infill.encode(values["input_prefix"], after, files, middle)

    async def _run(
        self, request: Request, values: dict[str, Any], prompts: Sequence[str | list[int]],
        field: str,
    ) -> ASGIApp:  # fmt: skip
        """Return the response to a checked request; ``field`` has its prompts."""
        own, context = self._completions, self._llm.limits.context
        defaults = {"max_tokens": context, **own.served.defaults}
        settings = defaults | sampling_settings(INFILL, values)
        if settings["max_tokens"] < 0:
            settings["max_tokens"] = context
        if values.get("n_probs"):
            settings["logprobs"] = values["n_probs"]
        if biases := values.get("logit_bias"):
            settings["logit_bias"] = await asyncio.to_thread(self._biases, biases)
        answer = NativeAnswer(own.name, self._llm.tokenizer, settings, values, context)
        names = {**setting_names(INFILL, values), "prompt": field}
        stream = values.get("stream", False)
        return await own.run(request, Job(prompts, settings, answer, stream, names))

    def _biases(self, biases: Mapping[int | str, float]) -> dict[int, float]:
        """Return biases by token id; that of a text is the bias of each of its tokens."""
        found: dict[int, float] = {}
        for key, bias in biases.items():
            ids = [key] if isinstance(key, int) else self._llm.tokenizer.encode(key)
            found |= dict.fromkeys(ids, bias)
        return found

    async def apply_template(self, request: Request) -> Response:
        """``/apply-template``: the text of a chat's prompt."""
        values = await self._completions.read(request, APPLY_TEMPLATE, "messages")
        more = {name: values[name] for name in ("add_generation_prompt",) if name in values}
        names = {"prompt": "messages"}
        return json_response({"prompt": await self._completions.render(values, names, **more)})

    async def props(self, request: Request) -> Response:
        """``/props``: what the server runs."""
        llm, own = self._llm, self._completions
        tokens = {"bos_token": llm.tokenizer.bos_id, "eos_token": llm.tokenizer.eos_id}
        shown = {
            name: "" if token is None else llm.tokenizer.piece(token).decode("utf-8", "replace")
            for name, token in tokens.items()
        }
        return json_response({
            "default_generation_settings": {
                "n_ctx": llm.limits.context,
                "params": default_settings(own.served.defaults),
            },
            "total_slots": llm.limits.sequences,
            "model_alias": own.name,
            "model_path": Path(llm.file.path).name,  # its folder is no concern of clients
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
