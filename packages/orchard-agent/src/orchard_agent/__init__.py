"""The agent inside a sandbox: its client, and the embedded `local` environment.

Names are imported when they are first used: a plugin host that only looks what is installed pays for none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchard_agent.calls import ClientLimits
    from orchard_agent.client import AgentSandbox, TarStream
    from orchard_agent.streams import SocketStream, TcpTransport, UnixTransport
    from orchard_agent.unpack import download_folder, unpack_tar

_HOMES = {
    "AgentSandbox": "client",
    "ClientLimits": "calls",
    "SocketStream": "streams",
    "TarStream": "client",
    "TcpTransport": "streams",
    "UnixTransport": "streams",
    "download_folder": "unpack",
    "unpack_tar": "unpack",
}

__all__ = [
    "AgentSandbox",
    "ClientLimits",
    "SocketStream",
    "TarStream",
    "TcpTransport",
    "UnixTransport",
    "download_folder",
    "unpack_tar",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
