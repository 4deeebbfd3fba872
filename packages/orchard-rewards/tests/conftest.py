"""Fixtures of the reward tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from reward_fakes import FolderSandbox


@pytest.fixture
def box(tmp_path: Path) -> FolderSandbox:
    """A stand-in sandbox: folders and commands of this machine, nothing isolated."""
    return FolderSandbox(tmp_path)
