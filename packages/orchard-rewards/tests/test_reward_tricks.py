"""No file that an agent leaves turns a failing check into a passing one; each trick is first shown to work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from reward_places import Place, WritableFolder, assert_not_forged, need
from reward_tricks import TRICKS


@pytest.mark.parametrize("name", TRICKS)
async def test_a_trick_does_not_forge_the_verdict(name: str, tmp_path: Path) -> None:
    trick = TRICKS[name]
    need(trick.needs)
    sandbox = WritableFolder(tmp_path)
    place = Place(sandbox=sandbox, work=str(sandbox.work), home=str(sandbox.home), tmp=str(sandbox.tmp))
    sandbox.spec.update({key: place.at(value) for key, value in trick.env.items()})
    await assert_not_forged(trick, place)


def test_pytest_reads_no_settings_from_above(tmp_path: Path) -> None:
    """SWE-bench#601: a conftest or settings above the check's folder must not decide what is run."""
    above = tmp_path / "tmp"
    check = above / "orchard-x" / "check"
    check.mkdir(parents=True)
    (check / "test_a.py").write_text("def test_a():\n    assert False\n")
    (above / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    (above / "conftest.py").write_text("import os\nos._exit(0)\n")

    def run() -> int:
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(argv, cwd=check, capture_output=True).returncode

    assert run() == 0, "the trick itself does not work"
    (above / "orchard-x" / "pytest.ini").touch()
    assert run() == 1
