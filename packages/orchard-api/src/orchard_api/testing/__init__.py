"""Conformance suites for plugin authors; needs the extra `testing`.

Example: every check of a backend, in a file of its tests.

    class TestMine(BackendSuite):
        @asynccontextmanager
        async def environment(self):
            environment = MyEnvironment(MyConfig())
            await environment.start()
            yield environment
            await environment.aclose()
"""

from orchard_api.testing.backend import BackendChecks, Subject
from orchard_api.testing.environment import EnvironmentSuite
from orchard_api.testing.files import FilesSuite
from orchard_api.testing.harness import HarnessSuite
from orchard_api.testing.plugin import PluginSuite
from orchard_api.testing.powers import (
    ForkSuite,
    PortsSuite,
    ProcessesSuite,
    PtySuite,
    RestraintsSuite,
    StreamingExecSuite,
)
from orchard_api.testing.reward import RewardSuite
from orchard_api.testing.sandbox import SandboxSuite
from orchard_api.testing.suite import Needs, Override, Suite, checks_of, needs
from orchard_api.testing.trainer import TrainerSuite

__all__ = [
    "BackendChecks",
    "BackendSuite",
    "EnvironmentSuite",
    "FilesSuite",
    "ForkSuite",
    "HarnessSuite",
    "Needs",
    "Override",
    "PluginSuite",
    "PortsSuite",
    "ProcessesSuite",
    "PtySuite",
    "RestraintsSuite",
    "RewardSuite",
    "SandboxSuite",
    "StreamingExecSuite",
    "Subject",
    "Suite",
    "TrainerSuite",
    "checks_of",
    "needs",
]


class BackendSuite(
    EnvironmentSuite,
    SandboxSuite,
    FilesSuite,
    StreamingExecSuite,
    ProcessesSuite,
    PtySuite,
    PortsSuite,
    ForkSuite,
    RestraintsSuite,
):
    """All checks of a backend; those of powers that it does not declare are skipped."""
