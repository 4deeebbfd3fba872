"""Fixtures of the harness tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness_fakes import CHATML, make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: a tiny byte-level BPE whose encode(decode(ids)) often differs, and a ChatML template."""
    return make_model(tmp_path_factory.mktemp("model"), CHATML)
