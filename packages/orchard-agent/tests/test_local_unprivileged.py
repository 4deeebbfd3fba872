"""The same sandboxes for a client that is not root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchard_agent.local.binary import agent_binary

# Everything is imported before the rights are given up: the interpreter may lie in a folder of root's.
CLIENT = """
import asyncio, concurrent.futures.thread, json, os, signal, sys, tarfile, tempfile, time
from pathlib import Path
from orchard_agent.local import doctor, environment
from orchard_agent.local.config import LocalConfig
from orchard_api.sandbox import SandboxSpec

base, mode, agent, uid = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
environment.agent_binary = doctor.agent_binary = lambda: agent
asyncio.new_event_loop().close()
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)

async def main():
    box = environment.LocalEnvironment(LocalConfig(base=base, isolation=mode))
    await box.start()
    sandbox = await box.create(SandboxSpec(), sandbox_id="mine")
    script = (
        "import os; os.makedirs('a/b'); open('a/b/f', 'w'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('/tmp', 0)"
    )
    found = {
        "id": (await sandbox.exec("id -u; id -g")).stdout_text,
        "caps": (await sandbox.exec("grep -h Cap /proc/self/status")).stdout_text,
        "write": (await sandbox.exec("echo x > f; cat f; echo x > /usr/f")).stdout_text,
        "net": (await sandbox.exec("cat /proc/net/dev | grep -c :")).stdout_text,
        "nested": (await sandbox.exec("unshare --user true")).exit_code,
        "closed": (await sandbox.exec(["python3", "-c", script])).exit_code,
        "timeout": (await sandbox.exec("setsid sleep 60 & sleep 60", timeout_s=0.3)).timed_out,
        "killed": await sandbox.kill_processes(),
    }
    pid = (await sandbox.status()).details["pid"]
    found["host_uid"] = int(
        next(line for line in open(f"/proc/{pid}/status") if line.startswith("Uid")).split()[1])
    found["doctor"] = {check.name: check.ok for check in doctor.checks()}
    await sandbox.aclose()
    await box.aclose()
    found["left"] = base.exists()
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["bubblewrap", "unshare"])
def test_a_normal_user_has_the_same_sandboxes(base: Path, mode: str) -> None:
    uid = 65_534 if os.geteuid() == 0 else os.geteuid()
    base.parent.chmod(0o777)
    agent = base.parent / "agent"
    shutil.copy(agent_binary(), agent)
    argv = [sys.executable, "-c", CLIENT, str(base), mode, str(agent), str(uid)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50, cwd="/tmp")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["id"] == "1000\n1000\n"
    assert {line.split()[1] for line in found["caps"].splitlines()} == {"0" * 16}
    assert (found["write"], found["net"], found["nested"]) == ("x\n", "1\n", 1)
    assert (found["closed"], found["timeout"], found["killed"]) == (0, True, 0)
    assert found["host_uid"] == uid
    assert found["doctor"] == {
        "local: agent": True,
        "local: limits": False,
        "local: bubblewrap": True,
        "local: unshare": True,
    }
    assert not found["left"]
