"""Reads a junit report that may be forged, broken or a bomb."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from xml.etree.ElementTree import Element

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import ParseError, fromstring

Outcome = Literal["passed", "failed", "skipped"]
MOST_CASES = 200_000
_DEPTH = 64
_WORST: Mapping[Outcome, int] = {"passed": 0, "skipped": 1, "failed": 2}


class JunitError(ValueError):
    """What was written is no junit report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JunitReport:
    """What a report says of each test.

    Attributes:
        outcomes: by `classname::name`; of a test that is reported twice, the worst counts.
    """

    outcomes: Mapping[str, Outcome]

    def count(self, outcome: Outcome) -> int:
        """How many tests ended so."""
        return sum(found == outcome for found in self.outcomes.values())

    def named(self, outcome: Outcome) -> list[str]:
        """The tests that ended so."""
        return [name for name, found in self.outcomes.items() if found == outcome]


def parse_junit(data: bytes) -> JunitReport:
    """Read a report; entities, document types and deep nesting are refused.

    Raises:
        JunitError: it can't be read.
    """
    try:
        root = fromstring(data, forbid_dtd=True)
    except (ParseError, DefusedXmlException, ValueError, LookupError, RecursionError) as error:
        raise JunitError(f"the report is not XML that can be trusted: {type(error).__name__}") from error
    outcomes: dict[str, Outcome] = {}
    level: list[Element] = [root]
    for _ in range(_DEPTH):
        below: list[Element] = []
        for element in level:
            if element.tag == "testcase":
                name = f"{element.get('classname', '')}::{element.get('name', '')}"
                outcome = _outcome(element)
                if name not in outcomes or _WORST[outcome] > _WORST[outcomes[name]]:
                    outcomes[name] = outcome
                if len(outcomes) > MOST_CASES:
                    raise JunitError(f"the report has more than {MOST_CASES} tests")
            elif element.tag in ("testsuites", "testsuite"):
                below += list(element)
        if not below:
            return JunitReport(outcomes=outcomes)
        level = below
    raise JunitError("the report is nested too deeply")


def _outcome(case: Element) -> Outcome:
    tags = {child.tag for child in case}
    if tags & {"failure", "error", "rerunFailure", "flakyFailure"}:
        return "failed"
    status = case.get("status", case.get("result", "")).lower()
    if "skipped" in tags or status in ("skipped", "disabled", "notrun", "suppressed"):
        return "skipped"
    return "passed"


def report_name(test: str) -> str:
    """The `classname::name` that a test is reported by: of a pytest node id, or of such a name itself.

    `tests/test_a.py::TestB::test_c[x/y]` is reported as `tests.test_a.TestB::test_c[x/y]`.
    """
    path, separator, parameters = test.partition("[")
    file, *inner = path.split("::")
    if not re.search(r"\.py$", file) or not inner:
        return test
    module = file.removesuffix(".py").replace("/", ".").lstrip(".")
    return f"{'.'.join([module, *inner[:-1]])}::{inner[-1]}{separator}{parameters}"
