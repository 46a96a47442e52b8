"""Requests generated from the OpenAPI schema, valid and not: every one is answered, none with a fault of the server.

Needs the `clients` dependency group.
"""

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from stepfloor.server.app import AppOptions, build_app
from tests.server.scripted import EOS, scripted

REQUESTS = 10_000


@pytest.mark.slow
def test_no_generated_request_is_a_fault_of_the_server() -> None:
    schemathesis = pytest.importorskip("schemathesis")
    # a context of 48 tokens, so that no answer is long however many tokens are asked for
    server = scripted(["a", "<think>", "</think>", "<tool_call>", "\n", EOS], (3,), max_model_len=48)
    app = build_app(server.service, AppOptions())
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in schema.get_all_operations() if "profile" not in result.ok().path]
    bodies = [operation for operation in operations if operation.method.upper() == "POST"]
    counts: dict[int, int] = {}

    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            del case.body["model"]  # a name made up is a 404, which says nothing about the rest
        response = case.call()
        counts[response.status_code] = counts.get(response.status_code, 0) + 1
        assert response.status_code < 500, (case.method, case.path, case.body, response.text)

    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    # hypothesis gives up early where it runs out of new examples; the next round draws others
    rounds = 0
    while sum(counts.values()) < REQUESTS and (rounds := rounds + 1) < 20:
        for mode, operation in itertools.product(modes, operations):
            examples = 200 if operation in bodies else 5
            try:
                strategy = operation.as_strategy(generation_mode=mode)
            except schemathesis.errors.InvalidSchema:
                continue
            run = given(case=strategy)(lambda case: check(case))
            quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
            try:
                settings(max_examples=examples, deadline=None, derandomize=False, suppress_health_check=quiet)(run)()
            except Exception as error:  # an operation without a body cannot be made wrong
                if "Unsatisfiable" not in type(error).__name__:
                    raise
    print(counts)
    assert sum(counts.values()) >= REQUESTS
    assert min(counts[200], counts[400]) > REQUESTS / 20
