"""Ports inside and ports that lead out, in sandboxes without any network."""

import asyncio
import contextlib
import hashlib
import json
import secrets

import pytest

from orchard_agent import AgentSandbox
from orchard_api.errors import SandboxGone, SandboxRequestError, TransportError
from orchard_api.powers import Ports, ReversePorts
from orchard_api.transport import ByteStream

SERVER = """
import hashlib, socket, sys
family = socket.AF_INET6 if sys.argv[1] == "::1" else socket.AF_INET
listener = socket.socket(family)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen(64)
print("up", flush=True)
while True:
    connection, _ = listener.accept()
    hash = hashlib.sha256()
    while data := connection.recv(65536):
        hash.update(data)
    connection.sendall(hash.hexdigest().encode())
    connection.close()
"""


async def listen_inside(box: AgentSandbox, port: int, address: str = "127.0.0.1") -> None:
    await box.write_file("server.py", SERVER.encode())
    process_id = await box.start_process(["python3", "server.py", address, str(port)])
    chunk = await box.read_output(process_id, offset=0, wait_s=20)
    assert chunk.data == b"up\n"


async def read_all(stream: ByteStream) -> bytes:
    parts = []
    while data := await asyncio.wait_for(stream.read(65536), 20):
        parts.append(data)
    return b"".join(parts)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_bytes_and_half_closes_go_through(box: AgentSandbox, address: str) -> None:
    assert isinstance(box, Ports)
    if address == "::1" and not (await box.exec("grep -q ' lo$' /proc/net/if_inet6")).ok:
        pytest.skip("no IPv6 loopback inside")
    await listen_inside(box, 8001, address)
    data = secrets.token_bytes(3_000_001)
    stream = await box.connect_port(8001)
    await stream.write(data)
    await stream.write_eof()
    assert (await read_all(stream)).decode() == hashlib.sha256(data).hexdigest()
    await stream.aclose()


async def test_a_port_nobody_listens_on(box: AgentSandbox) -> None:
    with pytest.raises(SandboxRequestError, match="nothing listens on port 8002"):
        await box.connect_port(8002)
    with pytest.raises(SandboxRequestError):
        await box.connect_port(0)
    assert (await box.exec("echo fine")).stdout_text == "fine\n"


async def test_many_streams_at_once(box: AgentSandbox) -> None:
    await listen_inside(box, 8003)

    async def one(i: int) -> None:
        data = bytes([i]) * 100_000
        stream = await box.connect_port(8003)
        await stream.write(data)
        await stream.write_eof()
        assert (await read_all(stream)).decode() == hashlib.sha256(data).hexdigest()
        await stream.aclose()

    await asyncio.gather(*(one(i) for i in range(64)))


async def test_a_service_that_dies_ends_its_streams(box: AgentSandbox) -> None:
    await listen_inside(box, 8004)
    stream = await box.connect_port(8004)
    await stream.write(b"x")
    await box.kill_processes()
    with contextlib.suppress(TransportError):
        assert await asyncio.wait_for(stream.read(10), 10) == b""
    await stream.aclose()


async def test_a_sandbox_that_is_deleted_ends_its_streams(box: AgentSandbox, environment) -> None:
    await listen_inside(box, 8005)
    stream = await box.connect_port(8005)
    reading = asyncio.ensure_future(stream.read(10))
    await asyncio.sleep(0.1)
    await environment.delete(box.sandbox_id)
    with contextlib.suppress(TransportError, SandboxGone):
        assert await asyncio.wait_for(reading, 10) == b""
    await stream.aclose()


async def test_a_local_address_for_a_port_inside(box: AgentSandbox) -> None:
    await listen_inside(box, 8006)
    forward = await box.forward_port(8006)
    reader, writer = await asyncio.open_connection("127.0.0.1", forward.port)
    writer.write(b"hello")
    writer.write_eof()
    assert (await asyncio.wait_for(reader.read(), 10)).decode() == hashlib.sha256(b"hello").hexdigest()
    writer.close()
    await writer.wait_closed()
    await forward.aclose()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", forward.port)


async def model_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A model's endpoint on the outside: answers one JSON request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")).split()[1])
    request = json.loads(await reader.readexactly(length))
    body = json.dumps({"reply": request["prompt"].upper()}).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


ASK = """
import json, sys, urllib.request
request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/v1", json.dumps({"prompt": sys.argv[2]}).encode())
print(json.load(urllib.request.urlopen(request, timeout=20))["reply"])
"""


async def test_a_sandbox_without_network_reaches_its_one_target(box: AgentSandbox) -> None:
    assert isinstance(box, ReversePorts)
    server = await asyncio.start_server(model_server, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()[1]
    await box.write_file("ask.py", ASK.encode())
    direct = await box.exec(["python3", "ask.py", str(target), "hi"])
    assert direct.exit_code != 0, "the sandbox has a network"
    port = await box.serve_port(0, host="127.0.0.1", target_port=target)
    assert port.port > 0
    asked = await asyncio.gather(*(box.exec(["python3", "ask.py", str(port.port), f"q{i}"]) for i in range(8)))
    assert [one.stdout_text for one in asked] == [f"Q{i}\n" for i in range(8)]
    await port.aclose()
    closed = await box.exec(["python3", "ask.py", str(port.port), "hi"])
    assert "refused" in closed.stderr_text
    again = await box.serve_port(port.port, host="127.0.0.1", target_port=target)
    assert (await box.exec(["python3", "ask.py", str(port.port), "again"])).stdout_text == "AGAIN\n"
    await again.aclose()
    server.close()
    await server.wait_closed()


async def test_a_taken_port_and_a_target_that_refuses(box: AgentSandbox) -> None:
    await listen_inside(box, 8007)
    with pytest.raises(SandboxRequestError, match="8007 can't be opened"):
        await box.serve_port(8007, host="127.0.0.1", target_port=9)
    port = await box.serve_port(0, host="127.0.0.1", target_port=1)
    await box.write_file("ask.py", ASK.encode())
    asked = await box.exec(["python3", "ask.py", str(port.port), "hi"], timeout_s=10)
    assert asked.exit_code == 1
    assert not asked.timed_out
    await port.aclose()


async def test_the_end_of_the_client_ends_its_ports(box: AgentSandbox, environment) -> None:
    server = await asyncio.start_server(model_server, "127.0.0.1", 0)
    port = await box.serve_port(0, host="127.0.0.1", target_port=server.sockets[0].getsockname()[1])
    other = await environment.attach(box.sandbox_id)
    await other.write_file("ask.py", ASK.encode())
    assert (await other.exec(["python3", "ask.py", str(port.port), "hi"])).stdout_text == "HI\n"
    await box.aclose()
    await asyncio.sleep(0.2)
    assert "refused" in (await other.exec(["python3", "ask.py", str(port.port), "hi"])).stderr_text
    await port.aclose()
    await other.aclose()
    server.close()
    await server.wait_closed()
