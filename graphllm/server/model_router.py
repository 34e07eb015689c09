"""The ASGI application of several models: each request goes to the model that it names."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .app import Model, ModelList, model_endpoints, model_state, show_metrics
from .errors import ApiError
from .fields import any_text, check_known
from .metrics import JoinedMetrics, Metrics, count_responses
from .model_pool import ModelPool, ModelSource
from .openapi import OPENAPI, OPERATIONS
from .request_body import read_json
from .routing import Endpoints, endpoints_app, health, page, server_app, without_version
from .served_model import MAX_BODY, ServedModel
from .streaming import until_disconnect


class ModelRouter:
    """Serves several models, each by the application that it has alone.

    The requests of an endpoint with a body name their model in its ``model``, the others in the
    query; the first model is the default. Names are looked up, and never opened as files.

    Args:
        sources: the models by name, at least one.
        keys, max_body, profile, defaults: see `create_app`.
        budget, timeout_s: see `ModelPool`.

    Attributes:
        app: the ASGI application.
        pool: the models.
    """

    def __init__(
        self,
        sources: Mapping[str, ModelSource],
        keys: Sequence[str] = (),
        max_body: int = MAX_BODY,
        profile: bool = False,
        budget: int | None = None,
        timeout_s: float = 300,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._names, self._max_body, self._profile = [*sources], max_body, profile
        self._defaults = defaults or {}
        self.pool = ModelPool(sources, self._make_app, budget, timeout_s)
        start = int(time.time())
        models = ModelList(dict.fromkeys(sources, start), self._state)
        registry = CollectorRegistry()  # the joined metrics, and the responses of all models
        registries = {name: each.registry for name, each in self.pool.metrics.items()}
        registry.register(JoinedMetrics(registries))
        own: list[Endpoints] = [
            ("GET", "/", page),
            ("GET", "/v1/models", models.list),
            ("GET", "/v1/models/{name:path}", models.describe),
            ("GET", "/health", health),
            ("GET", "/metrics", partial(show_metrics, registry)),
        ]
        taken = {(method, path.replace(":path}", "}")) for method, path, _ in own}
        others = [each for each in OPERATIONS if each not in {*taken, ("GET", OPENAPI)}]
        table = [(*each, self._with_model) for each in others]
        self.app = server_app([*own, *table], keys, count_responses(registry))

    def _make_app(self, name: str, model: Model, metrics: Metrics) -> ASGIApp:
        served = ServedModel([name], self._max_body, self._defaults, self._profile)
        table = model_endpoints(model, served, metrics)
        return endpoints_app([*table, *without_version(table)])

    def _state(self, name: str) -> dict[str, Any]:
        model = self.pool.loaded(name)
        known = {} if model is None else model_state(model)
        return {**known, "status": self.pool.state(name)}

    async def _with_model(self, request: Request) -> ASGIApp:
        """Return the application of the model that a request names.

        Only a request with a body loads a model, since any web page may send the others.
        """
        if request.method == "GET":
            name = self._known(request.query_params.get("model"))
            if self.pool.loaded(name) is None:
                text = f"the model {name!r} is not loaded; the first request that it answers does"
                raise ApiError(503, text, "model", "model_not_loaded")
        else:
            body = await read_json(request, self._max_body)
            name = self._known(body.get("model") if isinstance(body, dict) else None)
        app = await until_disconnect(request.receive, self.pool.acquire(name))

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            finally:
                self.pool.release(name)

        return run

    def _known(self, given: Any) -> str:
        """Return the name of a model, by default the first. ApiError: there is none."""
        name = self._names[0] if given is None else any_text("model", given)
        check_known(name, self._names)
        return name
