"""`${NAME}` and `${NAME:-default}` in a check's environment, filled from the host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SHORTEST_SECRET = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class FilledEnv:
    """An environment after substitution.

    Attributes:
        values: what the check gets.
        secrets: values that came from the host; they must not appear in evidence. In no repr.
        unset: references that have neither a value nor a default, as `KEY: ${NAME}`.
    """

    values: Mapping[str, str]
    secrets: frozenset[str]
    unset: tuple[str, ...]

    def __repr__(self) -> str:
        return f"FilledEnv({', '.join(self.values)})"

    def scrub(self, text: str) -> str:
        """A text without the host's values."""
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


def fill(env: Mapping[str, str], host: Mapping[str, str]) -> FilledEnv:
    """Fill references from `host`; an empty variable counts as unset, as in a shell's `:-`."""
    secrets: set[str] = set()
    unset: list[str] = []
    values: dict[str, str] = {}
    for key, template in env.items():

        def replacement(match: re.Match[str], key: str = key) -> str:
            name, default = match.groups()
            value = host.get(name)
            if value:
                if len(value) >= _SHORTEST_SECRET:
                    secrets.add(value)
                return value
            if default is None:
                unset.append(f"{key}: ${{{name}}}")
                return ""
            return str(default)

        values[key] = _REFERENCE.sub(replacement, template)
    return FilledEnv(values=values, secrets=frozenset(secrets), unset=tuple(unset))
