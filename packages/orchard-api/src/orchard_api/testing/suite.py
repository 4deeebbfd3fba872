"""What a conformance suite is: checks that become tests, overrides with a reason, and what a check needs.

A suite is a class with `check_*` coroutines. A subclass of it, named `Test...` so that pytest collects it, says how its
subject is made; each check then is a test of that class. Nothing but pytest is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import pytest

from orchard_api.environment import Capabilities

Check = Callable[..., Coroutine[Any, Any, None]]
C = TypeVar("C", bound=Check)

CHECK_S = 120.0
"""Seconds that one check may take, the making of its subject included."""


@dataclass(frozen=True, slots=True)
class Override:
    """A check that a subject does not pass, and why that is right for it.

    The test is then expected to fail, strictly: once the subject passes, the override must go.
    """

    reason: str

    def __post_init__(self) -> None:
        if len(self.reason.strip()) < 10:
            raise ValueError("an override needs a reason that says why: a sentence of ten characters at least")


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a backend must be able to give for a check to make sense; see `Capabilities`."""

    powers: frozenset[str] = frozenset()
    networks: frozenset[str] = frozenset()
    limits: frozenset[str] = frozenset()
    programs: bool = False

    def missing(self, capabilities: Capabilities) -> str:
        """What is not there, or empty."""
        lacks = [
            *sorted(self.powers - capabilities.powers),
            *(f"network {mode!r}" for mode in sorted(self.networks - capabilities.networks)),
            *(f"a limit on {name}" for name in sorted(self.limits - capabilities.limits)),
        ]
        if self.programs and not capabilities.programs:
            lacks.append("a list of programs")
        return ", ".join(lacks)


def needs(
    *powers: str,
    networks: frozenset[str] = frozenset(),
    limits: frozenset[str] = frozenset(),
    programs: bool = False,
) -> Callable[[C], C]:
    """Mark a check as one for backends whose capabilities say that they have all of this; else it is skipped."""

    def mark(check: C) -> C:
        check.needs = Needs(  # type: ignore[attr-defined]
            powers=frozenset(powers), networks=networks, limits=limits, programs=programs
        )
        return check

    return mark


def needs_of(check: Check) -> Needs:
    """What a check was marked with."""
    found: Needs = getattr(check, "needs", Needs())
    return found


class Suite:
    """Base of all suites.

    Attributes:
        overrides: by the name of a check without `check_`: why this subject does not pass it.
    """

    overrides: ClassVar[Mapping[str, Override]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith("orchard_api.testing"):
            return
        names = checks_of(cls)
        for name in names:
            inherited = any(f"check_{name}" in vars(base) for base in cls.__mro__[1:])
            for attribute in (f"test_{name}", *([f"check_{name}"] if inherited else [])):
                if attribute in vars(cls):
                    raise TypeError(f"{cls.__name__} may not replace {attribute}: add an Override with the reason")
        for name, override in cls.overrides.items():
            if name not in names:
                raise TypeError(f"{cls.__name__} overrides {name!r}, which is not a check of it")
            if not isinstance(override, Override):
                raise TypeError(f"{cls.__name__} overrides {name!r} without a reason: write Override('...')")
        for name in names:
            setattr(cls, f"test_{name}", _test(name, cls.overrides.get(name)))

    async def run_check(self, name: str) -> None:
        """Run one check on a fresh subject, within its deadline."""
        async with asyncio.timeout(CHECK_S):
            await self.run(getattr(self, f"check_{name}"))

    async def run(self, check: Check) -> None:
        """Make the subject and give it to a check; each kind of suite has its own way."""
        await check()


def checks_of(suite: type[Suite]) -> list[str]:
    """Names of a suite's checks, without `check_`."""
    return [name.removeprefix("check_") for name in dir(suite) if name.startswith("check_")]


def _test(name: str, override: Override | None) -> Callable[[Suite], None]:
    def test(self: Suite) -> None:
        asyncio.run(self.run_check(name))

    test.__name__ = test.__qualname__ = f"test_{name}"
    if override is not None:
        return pytest.mark.xfail(reason=override.reason, strict=True)(test)
    return test
