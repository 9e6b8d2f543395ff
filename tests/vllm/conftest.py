"""Tests with a real vLLM, in an environment of its own: `make test-vllm`."""

import pytest

from tests.stages.conftest import gold_run  # noqa: F401 (a fixture)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm/" in item.path.as_posix():
            item.add_marker(pytest.mark.vllm)
