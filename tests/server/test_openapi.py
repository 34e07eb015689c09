"""The OpenAPI document, and requests that `schemathesis` makes from it."""

from __future__ import annotations

from typing import Any

import chat_model
import pytest
from running_server import KEY

import graphllm

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> graphllm.LLM:
    return chat_model.load(tmp_path_factory.mktemp("openapi"), context=128)


@pytest.fixture(scope="module")
def api(server) -> Any:
    return schemathesis.openapi.from_dict(server.call("/openapi.json")[1])


def test_every_endpoint_is_in_the_document(server, api):
    app = server.server.config.app
    while not hasattr(app, "routes"):
        app = app._app
    routes = {(method, route.path.replace(":path}", "}")) for route in app.routes
              for method in route.methods - {"HEAD"}}  # fmt: skip
    listed = {(each.method.upper(), each.path) for each in operations(api)}
    aliases = {(method, path.removeprefix("/v1")) for method, path in listed}
    assert listed == routes - {("GET", "/")} - (aliases - listed)


def operations(api: Any) -> list[Any]:
    return [found.ok() for found in api.get_all_operations()]


@pytest.mark.long
def test_requests_made_from_the_document(server, api):
    """No status 5xx, no answer that violates its schema, no invalid request that is accepted."""
    url = f"http://127.0.0.1:{server.port}"
    checks = schemathesis.specs.openapi.checks  # valid for its schema, a value may be refused
    settings = hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
    kinds = schemathesis.GenerationMode
    for operation in operations(api):
        for mode in (kinds.POSITIVE, kinds.NEGATIVE) if operation.body else (kinds.POSITIVE,):

            @settings
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def run(case):
                case.call_and_validate(
                    base_url=url, headers=HEADERS, excluded_checks=[checks.positive_data_acceptance]
                )

            run()
