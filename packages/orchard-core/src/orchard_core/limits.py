"""Limits of this process that a run may hit."""

from __future__ import annotations

import resource

from orchard_api.errors import ConfigError

FILES_PER_SANDBOX = 8
FILES_BESIDES = 128


def ensure_file_descriptors(concurrency: int) -> None:
    """Make sure that `concurrency` sandboxes fit into the limit on open files, raising the soft limit if it must.

    Raises:
        ConfigError: the hard limit is too low; names the needed number.
    """
    needed = FILES_BESIDES + FILES_PER_SANDBOX * concurrency
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"rollout.concurrency: {concurrency} sandboxes at once need about {needed} open files; the limit is {hard}",
            hint=f"run `ulimit -n {needed}` before, or set rollout.concurrency to at most "
            f"{max((hard - FILES_BESIDES) // FILES_PER_SANDBOX, 1)}",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
