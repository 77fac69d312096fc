"""schemathesis drives every route from the server's own OpenAPI description."""

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from .live_server import LiveServer

# Not positive_data_acceptance: a schema cannot say that the model must be the served one, that a
# prompt must fit, or that two fields must agree.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


# The server's threads draw random numbers too, which hypothesis takes for the strategies' doing.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize(
    ("mode", "examples"),
    [
        # Drawing a body takes longer than answering it.
        pytest.param(GenerationMode.POSITIVE, 3, marks=pytest.mark.thorough),
        (GenerationMode.NEGATIVE, 8),
        pytest.param(GenerationMode.POSITIVE, 100, marks=pytest.mark.slow),
        pytest.param(GenerationMode.NEGATIVE, 100, marks=pytest.mark.slow),
    ],
)
def test_every_route(server: LiveServer, mode, examples):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    tried: dict[str, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # nothing to get wrong

        @settings(
            max_examples=examples,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def drive(case):
            tried[case.operation.label] = tried.get(case.operation.label, 0) + 1
            case.call_and_validate(checks=CHECKS, timeout=60)

        drive()
        assert httpx2.get(server.url + "/health", timeout=60).status_code == 200, operation.label
    assert len(tried) >= (26 if mode is GenerationMode.POSITIVE else 7), tried
    assert min(tried.values()) >= 1
    server.wait_idle(60)
