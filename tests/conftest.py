"""Fixtures of the tests across packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from model_api import ModelApi, solve_hello


@pytest.fixture
def model_api() -> Iterator[ModelApi]:
    """A model's API whose answers solve the task of `orchard init`."""
    with ModelApi(solve_hello).serving() as api:
        yield api
