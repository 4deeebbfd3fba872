"""The agent inside a sandbox: its client, and the embedded `local` environment."""

from orchard_agent.client import AgentSandbox, ClientLimits, TarStream
from orchard_agent.streams import SocketStream, TcpTransport, UnixTransport
from orchard_agent.unpack import download_folder, unpack_tar

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
