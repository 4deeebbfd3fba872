"""A task's own test suite as the check: the agent's tree holds a copy of it, and may do to the copy what it likes."""

from __future__ import annotations

import pytest
from reward_fakes import episode
from test_reward_local import REWARD, Make, make  # noqa: F401  (make is a fixture)

from orchard_api.task import Check

pytestmark = pytest.mark.real

SUITE = b"""
import importlib.util, os, unittest

spec = importlib.util.spec_from_file_location("total", os.path.join(os.environ["WORKDIR"], "total.py"))
total = importlib.util.module_from_spec(spec)
spec.loader.exec_module(total)

class Totals(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(total.add(2, 3), 5)
"""
CHECK = Check(command="python3 -m unittest -v test_total", files={"test_total.py": SUITE}, timeout_s=30.0)
RIGHT, WRONG = b"def add(a, b):\n    return a + b\n", b"def add(a, b):\n    return a - b\n"

TRICKS = {
    "SWE-bench#601: forged lines of passed tests": (
        'printf \'print("test_sum (test_total.Totals) ... ok")\\nprint("OK")\\n\' | tee conftest.py sitecustomize.py '
        "> unittest.py; printf '[pytest]\\naddopts = --co\\n' > pytest.ini"
    ),
    "SWE-smith#24: the test module deleted": "rm -f tests/test_total.py test_total.py; rmdir tests",
    "verifiers#1212: the test weakened": (
        "printf 'import unittest\\nclass Totals(unittest.TestCase):\\n    def test_sum(self): pass\\n' "
        "| tee tests/test_total.py > test_total.py"
    ),
}


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize(("solution", "value"), [(WRONG, 0.0), (RIGHT, 1.0)])
async def test_only_the_solution_decides(trick: str, solution: bytes, value: float, make: Make) -> None:  # noqa: F811
    sandbox = await make()
    await sandbox.write_file("tests/test_total.py", SUITE)
    await sandbox.write_file("total.py", solution)
    assert (await sandbox.exec(TRICKS[trick])).ok
    score = await REWARD.score(episode(sandbox, CHECK))
    assert score.value == value, score.evidence
    assert await sandbox.read_file("total.py") == solution
