"""What `orchard init` writes: a run file and one task in the Harbor format."""

from __future__ import annotations

from pathlib import Path

from orchard_api.errors import ConfigError

RUN_TOML = """# orchard eval run.toml --set policies.main.model=MODEL
# The endpoint is $OPENAI_BASE_URL (any OpenAI-compatible API), the key $OPENAI_API_KEY.

[tasks]
name = "directory"
path = "tasks"

[environment]
backend = "local"        # sandboxes on this Linux machine; change to another installed backend, nothing else

[harness]
name = "react"           # the built-in loop: the model answers with <shell>...</shell>, <edit>...</edit>, <submit/>
max_turns = 10

[policies.main]
server = "openai"
model = "gpt-4o-mini"

[sampling]
max_tokens = 1024
temperature = 0.7

[evaluation]
split = "all"
attempts = 1             # episodes per task

[[rewards]]
name = "command"         # runs the task's tests when the agent is gone
"""

TASK_TOML = """schema_version = "1.4"

[task]
name = "demo/hello"
description = "Write a greeting into a file."

[agent]
timeout_sec = 120

[verifier]
timeout_sec = 60

[environment]
network_mode = "no-network"
"""

INSTRUCTION = """Write a file `hello.txt` in the working directory. It must hold exactly one line: `hello, orchard`.
Submit when it is there.
"""

TEST_SH = """#!/bin/sh
# Runs when the agent's processes are gone, from a folder that the agent never saw. $WORKDIR is where the agent worked.
if [ "$(cat "$WORKDIR/hello.txt" 2>/dev/null)" = "hello, orchard" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""

SOLVE_SH = """#!/bin/sh
printf 'hello, orchard\\n' > hello.txt
"""

README = """# Tasks for Orchard

```console
$ export OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=...
$ orchard eval run.toml --set policies.main.model=MODEL
```

The last line that it prints names the run's `report.html`: the numbers, and whole episodes to read.

* `orchard eval run.toml --set harness='{name="scripted"}'` plays the tasks' own solutions: do your tests accept them?
  With `noop` instead, nothing is done: do they refuse that?
* A task is a folder in `tasks/` (the Harbor format): `instruction.md` is what the agent is asked, `tests/test.sh`
  writes 0 or 1 (or anything between) into `/logs/verifier/reward.txt`, `solution/solve.sh` is optional, and `task.toml`
  has timeouts and what the sandbox must be. Copy `tasks/hello` to begin another.
* `orchard doctor` says what is missing on this machine.
"""

FILES = {
    "README.md": README,
    "run.toml": RUN_TOML,
    "tasks/hello/task.toml": TASK_TOML,
    "tasks/hello/instruction.md": INSTRUCTION,
    "tasks/hello/tests/test.sh": TEST_SH,
    "tasks/hello/solution/solve.sh": SOLVE_SH,
}


def write_project(folder: Path) -> list[Path]:
    """Write the files and return their paths.

    Raises:
        ConfigError: one of them exists already; nothing is written then.
    """
    taken = [name for name in FILES if (folder / name).exists()]
    if taken:
        raise ConfigError(f"{folder / taken[0]} exists already", hint="choose another folder: orchard init DIR")
    written = []
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith(".sh"):
            path.chmod(0o755)
        written.append(path)
    return written
