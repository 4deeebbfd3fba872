"""Checks of an `Environment`: identity, listing, and that nothing is left."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from orchard_api import powers
from orchard_api.errors import CapabilityError, SandboxGone
from orchard_api.sandbox import NetworkRule, SandboxState
from orchard_api.testing.backend import BackendChecks, Subject, eventually

POWERS = ("StreamingExec", "Processes", "Pty", "Snapshot", "Fork", "Ports", "ReversePorts")


class EnvironmentSuite(BackendChecks):
    """What every backend owes its users."""

    async def check_a_sandbox_has_the_id_it_was_given(self, subject: Subject) -> None:
        """The id comes from the caller."""
        name = subject.fresh_id()
        box = await subject.create(sandbox_id=name)
        assert box.sandbox_id == name

    async def check_creating_twice_adopts_the_first(self, subject: Subject) -> None:
        """A caller who never heard the answer asks again, and gets the same machine."""
        name = subject.fresh_id()
        first = await subject.create(sandbox_id=name)
        await first.write_file("made-by-the-first", b"x")
        second = await subject.create(sandbox_id=name)
        assert await second.read_file("made-by-the-first") == b"x"

    async def check_sandboxes_are_apart(self, subject: Subject) -> None:
        """Two sandboxes share no files."""
        one, other = await subject.create(), await subject.create()
        await one.write_file("mine", b"x")
        assert not (await other.exec("test -e mine")).ok

    async def check_many_start_at_once(self, subject: Subject) -> None:
        """Eight creations together."""
        boxes = await asyncio.gather(*(subject.create() for _ in range(8)))
        results = await asyncio.gather(*(box.exec(f"echo {number}") for number, box in enumerate(boxes)))
        assert [result.stdout_text for result in results] == [f"{number}\n" for number in range(8)]

    async def check_the_listing_shows_state_and_labels(self, subject: Subject) -> None:
        """What runs is listed by the backend itself, with the labels that it was given."""
        labels = {"orchard.owner": subject.fresh_id(), "kind": "a"}
        box = await subject.create(replace(subject.spec, labels=labels))
        (info,) = await subject.environment.list({"orchard.owner": labels["orchard.owner"]})
        assert info.sandbox_id == box.sandbox_id
        assert info.state is SandboxState.READY
        assert dict(info.labels) == labels

    async def check_the_listing_takes_all_labels_into_account(self, subject: Subject) -> None:
        """A sandbox that has only some of the labels asked for is not listed."""
        owner = subject.fresh_id()
        await subject.create(replace(subject.spec, labels={"orchard.owner": owner}))
        assert await subject.environment.list({"orchard.owner": owner, "kind": "other"}) == []

    async def check_attach_opens_the_same_machine(self, subject: Subject) -> None:
        """A second handle sees what the first one did."""
        box = await subject.create()
        await box.write_file("note", b"found")
        again = await subject.environment.attach(box.sandbox_id)
        assert await again.read_file("note") == b"found"
        await again.aclose()

    async def check_closing_a_handle_leaves_the_machine(self, subject: Subject) -> None:
        """`aclose` of a handle is not the sandbox's end."""
        box = await subject.create()
        await box.aclose()
        again = await subject.environment.attach(box.sandbox_id)
        assert (await again.exec("echo on")).stdout_text == "on\n"
        await again.aclose()

    async def check_attaching_to_none_is_gone(self, subject: Subject) -> None:
        """An id that nobody has."""
        with pytest.raises(SandboxGone):
            await subject.environment.attach(subject.fresh_id())

    async def check_deleting_takes_it_off_the_listing(self, subject: Subject) -> None:
        """Deleted is gone: not listed, not attachable."""
        owner = subject.fresh_id()
        box = await subject.create(replace(subject.spec, labels={"orchard.owner": owner}))
        await subject.environment.delete(box.sandbox_id)
        assert list(await subject.environment.list({"orchard.owner": owner})) == []
        with pytest.raises(SandboxGone):
            await subject.environment.attach(box.sandbox_id)

    async def check_deleting_none_is_fine(self, subject: Subject) -> None:
        """Deletion is idempotent."""
        await subject.environment.delete(subject.fresh_id())

    async def check_calls_on_a_deleted_sandbox_say_that_it_is_gone(self, subject: Subject) -> None:
        """`SandboxGone`, within two seconds of noticing; five are allowed here."""
        box = await subject.create()
        await subject.environment.delete(box.sandbox_id)
        begin = time.monotonic()
        with pytest.raises(SandboxGone):
            await box.exec("true", timeout_s=60)
        assert time.monotonic() - begin < 5

    async def check_a_running_command_ends_with_its_sandbox(self, subject: Subject) -> None:
        """Whoever waits for a command of a sandbox that is deleted hears of it."""
        box = await subject.create()
        waiting = asyncio.ensure_future(box.exec("sleep 60", timeout_s=90))
        await asyncio.sleep(0.3)
        await subject.environment.delete(box.sandbox_id)
        begin = time.monotonic()
        with pytest.raises(SandboxGone):
            await waiting
        assert time.monotonic() - begin < 10

    async def check_what_it_cannot_give_is_refused(self, subject: Subject) -> None:
        """A spec beyond the capabilities is a `CapabilityError`, and nothing is made."""
        environment = subject.environment
        modes = {"none", "full", "allowlist"} - environment.capabilities.networks
        owner = subject.fresh_id()
        if modes:
            spec = replace(subject.spec, network=NetworkRule(mode=sorted(modes)[0]))  # type: ignore[arg-type]
        else:
            spec = replace(subject.spec, architecture="pdp11")
        with pytest.raises(CapabilityError):
            await subject.create(replace(spec, labels={"orchard.owner": owner}))
        assert list(await environment.list({"orchard.owner": owner})) == []

    async def check_a_cancelled_creation_leaves_nothing(self, subject: Subject) -> None:
        """At several moments of it."""
        owner = subject.fresh_id()
        spec = replace(subject.spec, labels={"orchard.owner": owner})
        for wait_s in (0.0, 0.005, 0.02, 0.1):
            name = subject.fresh_id()
            task = asyncio.ensure_future(subject.environment.create(spec, sandbox_id=name))
            await asyncio.sleep(wait_s)
            task.cancel()
            try:
                box = await task
            except asyncio.CancelledError:
                continue
            await box.aclose()
            await subject.environment.delete(name)
        assert list(await subject.environment.list({"orchard.owner": owner})) == []

    async def check_a_sandbox_nobody_uses_ends_by_itself(self, subject: Subject) -> None:
        """The TTL ends it without anybody's help."""
        box = await subject.create(replace(subject.spec, ttl_s=1.5))

        async def ended() -> bool:
            infos = [info for info in await subject.environment.list() if info.sandbox_id == box.sandbox_id]
            return not infos or infos[0].state is SandboxState.LOST

        await eventually(ended, within_s=15, what="the end of a sandbox whose TTL is 1.5 s")

    async def check_signs_of_life_keep_it(self, subject: Subject) -> None:
        """Each call renews the TTL."""
        box = await subject.create(replace(subject.spec, ttl_s=1.5))
        for _ in range(8):
            await asyncio.sleep(0.4)
            await box.status()
        assert (await box.exec("echo on")).stdout_text == "on\n"

    async def check_renewing_keeps_it(self, subject: Subject) -> None:
        """`renew` sets a new time to live."""
        box = await subject.create(replace(subject.spec, ttl_s=1.5))
        await subject.environment.renew(box.sandbox_id, 600)
        await asyncio.sleep(3.5)
        assert (await box.exec("echo on")).stdout_text == "on\n"

    async def check_closing_the_environment_ends_what_it_made(self, subject: Subject) -> None:
        """`aclose` deletes; it may be called again."""
        box = await subject.create()
        subject.closed = True
        await subject.environment.aclose()
        with pytest.raises(SandboxGone):
            await box.exec("true", timeout_s=60)
        await subject.environment.aclose()

    async def check_the_powers_are_as_declared(self, subject: Subject) -> None:
        """What `capabilities.powers` says is what its sandboxes have, neither more nor less."""
        box = await subject.create()
        has = {name for name in POWERS if isinstance(box, getattr(powers, name))}
        assert has == set(subject.environment.capabilities.powers)
