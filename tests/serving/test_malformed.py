"""Requests made from the OpenAPI document, right and wrong: each is answered, none with an error of the server."""

import pytest
from hypothesis import HealthCheck, given, settings

pytestmark = pytest.mark.long


def test_no_request_of_the_documents_making_fails_the_server(app, thread):
    import schemathesis  # which takes a second

    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"host": "127.0.0.1"})
    statuses: dict[int, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def ask(case):
            answer = case.call(headers={"host": "127.0.0.1"})
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, answer.text

        ask()
    assert sum(statuses.values()) >= 200, statuses
    assert not len(thread)
