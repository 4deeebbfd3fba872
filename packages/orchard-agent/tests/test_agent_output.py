from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from orchard_agent import AgentSandbox


def peak_mb(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.parametrize("size", [0, 1, 9_999, 10_000, 10_001, 16_384, 1_000_003])
async def test_the_limit_keeps_head_and_tail_and_counts_the_rest(box: AgentSandbox, size: int) -> None:
    """Case 32."""
    script = f"import sys; sys.stdout.buffer.write(bytes(i * 7 % 251 for i in range({size})))"
    whole = bytes(i * 7 % 251 for i in range(size))
    result = await box.exec(["python3", "-c", script], output_limit=10_000)
    assert result.stdout_dropped == max(0, size - 10_000)
    assert result.truncated == (size > 10_000)
    assert result.stdout == (whole if size <= 10_000 else whole[:5_000] + whole[-5_000:])


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7])
async def test_tiny_limits(box: AgentSandbox, limit: int) -> None:
    result = await box.exec("printf 0123456789; printf abc >&2", output_limit=limit)
    head, tail = (limit + 1) // 2, limit // 2
    assert result.stdout == b"0123456789"[:head] + (b"0123456789"[-tail:] if tail else b"")
    assert (result.stdout_dropped, result.stderr_dropped) == (10 - limit, max(0, 3 - limit))


async def test_any_bytes_come_out_exact_and_text_never_fails(box: AgentSandbox) -> None:
    """Case 33: a bad byte loses nothing, and a character on a boundary of chunks stays whole."""
    result = await box.exec(r"printf '\377\376ok'")
    assert (result.exit_code, result.stdout, result.stdout_text) == (0, b"\xff\xfeok", "\ufffd\ufffdok")
    text = "x" + "é€𝄞" * 20_000
    await box.write_file("text", text.encode())
    result = await box.exec("cat text")
    assert result.stdout_text == text


async def test_all_that_a_command_wrote_before_its_exit_is_there(box: AgentSandbox) -> None:
    """However late the pipe is read: the exit does not cut what was written before it."""
    for _ in range(20):
        result = await box.exec("head -c 65536 /dev/zero; head -c 5000 /dev/zero >&2")
        assert (len(result.stdout), len(result.stderr)) == (65_536, 5_000)


async def test_half_a_gigabyte_costs_the_agent_little(box: AgentSandbox) -> None:
    """Cases 22 and 37, by the agent's own peak memory."""
    result = await box.exec("head -c 500000000 /dev/zero", output_limit=1 << 20, timeout_s=40)
    assert result.stdout_dropped == 500_000_000 - (1 << 20)
    pid = (await box.status()).details["pid"]
    assert peak_mb(pid) <= 32


async def test_an_endless_writer_is_capped_and_ended(box: AgentSandbox) -> None:
    """Case 22."""
    result = await box.exec("yes", timeout_s=0.5, output_limit=1 << 20)
    assert result.timed_out
    assert len(result.stdout) == 1 << 20
    assert result.stdout_dropped > 0


async def test_many_results_at_once_keep_the_agent_small(box: AgentSandbox) -> None:
    for _ in range(6):
        results = await asyncio.gather(*(box.exec("head -c 1000000 /dev/zero") for _ in range(4)))
        assert all(len(result.stdout) == 1_000_000 for result in results)
    assert peak_mb((await box.status()).details["pid"]) <= 48


async def test_a_huge_patch_comes_out_by_its_file(box: AgentSandbox) -> None:
    """Case 35."""
    assert (await box.exec("yes 'diff line' | head -c 50000000 > patch")).ok
    data = await box.read_file("patch")
    assert len(data) == 50_000_000
    assert data.startswith(b"diff line\ndiff line\n")
