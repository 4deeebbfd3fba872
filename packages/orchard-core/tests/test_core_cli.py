"""What the user meets: one clear message per mistake, no traceback, nothing left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAKES = Path(__file__).parent / "core_fakes.py"

RUN = """
name = "demo"
[tasks]
name = "tasks.py:Tasks"
[environment]
backend = "FAKES:DictEnvironment"
[harness]
name = "FAKES:Play"
[[rewards]]
name = "FAKES:Fixed"
as = "fixed"
[evaluation]
split = "all"
[rollout]
concurrency = 2
backoff_s = 0.0
infra_retries = 0
""".replace("FAKES", str(FAKES))

TASKS = """
import asyncio, os, time
from orchard_api import PluginConfig, Task
from orchard_api.errors import TaskError

class Tasks:
    Config = PluginConfig
    def __init__(self, config): pass
    def tasks(self, split, *, seed):
        if split != "all":
            raise TaskError(f"unknown split {split!r}")
        for number in range(6):
            yield Task(task_id=f"t{number}", instruction="do")
"""


def orchard(folder: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(FAKES.parent), "COLUMNS": "120", **options.pop("env", {})}  # type: ignore[dict-item]
    return subprocess.run(
        [sys.executable, "-m", "orchard_core.cli", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


def test_an_evaluation_leaves_a_whole_run_folder(project: Path) -> None:
    done = orchard(project, "eval", "run.toml", "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    assert "1.000" in done.stdout
    out = project / "out"
    assert {"config.json", "episodes", "metrics.jsonl", "report.html", "summary.json"} <= {
        p.name for p in out.iterdir()
    }
    summary = json.loads((out / "summary.json").read_text())
    assert summary["stages"]["eval"]["heldout_success"] == 1.0
    assert summary["failures"] == {"policy": 0, "harness": 0, "infra": 0}
    from orchard_api.schema import read_episodes

    assert sorted(e.task.task_id for e in read_episodes(out / "episodes" / "eval")) == [f"t{n}" for n in range(6)]
    page = (out / "report.html").read_text()
    assert "Episodes to read" in page
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page)


def test_an_existing_run_is_not_overwritten_unless_told_and_foreign_folders_never(project: Path) -> None:
    assert orchard(project, "eval", "run.toml", "--run-dir", "out").returncode == 0
    again = orchard(project, "eval", "run.toml", "--run-dir", "out")
    assert again.returncode == 2
    assert "out exists already" in again.stderr
    assert "--overwrite" in again.stderr
    assert orchard(project, "eval", "run.toml", "--run-dir", "out", "--overwrite").returncode == 0
    (project / "mine").mkdir()
    (project / "mine" / "thesis.txt").write_text("x")
    foreign = orchard(project, "eval", "run.toml", "--run-dir", "mine", "--overwrite")
    assert foreign.returncode == 2
    assert (project / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "environment.backend=dcoker",
            ["environment.backend", "unknown environment 'dcoker'", "did you mean 'docker'"],
        ),
        ("environment.backend=docker", ["unknown environment 'docker'", "pip install orchard-env-docker"]),
        ("rollout.concurrency=many", ["rollout.concurrency", "valid integer", "got 'many'"]),
        ("rollout.speed=3", ["rollout.speed: unknown key"]),
        ("evaluation.split=nope", ["unknown split 'nope'"]),
    ],
)
def test_a_mistake_in_the_run_file_is_one_message_with_the_place(
    project: Path, override: str, expected: list[str]
) -> None:
    done = orchard(project, "eval", "run.toml", "--set", override)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for part in expected:
        assert part in done.stderr


def test_a_plugin_that_fails_at_import_is_told_apart_from_a_missing_one(project: Path) -> None:
    site = project / "site"
    info = site / "broken_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[orchard]\nwonder = broken_plugin\n")
    (site / "broken_plugin.py").write_text("import not_there_at_all\n")
    env = {"PYTHONPATH": f"{site}:{FAKES.parent}"}
    done = orchard(project, "eval", "run.toml", "--set", "environment.backend=wonder", env=env)
    assert done.returncode == 2
    assert "broken-plugin, which is installed but failed to load: ModuleNotFoundError" in done.stderr
    listed = orchard(project, "plugins", env=env)
    assert listed.returncode == 0
    assert "broken" in listed.stdout
    assert "not_there_at_all" in listed.stdout
    disabled = orchard(project, "plugins", env={**env, "ORCHARD_DISABLE_PLUGINS": "wonder"})
    assert "disabled" in disabled.stdout


def test_two_packages_with_one_name_are_an_error_that_names_both(project: Path) -> None:
    site = project / "site"
    for package in ("first_plugin", "second_plugin"):
        info = site / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[orchard]\n{package} = {package}\n")
        (site / f"{package}.py").write_text(
            "from orchard_api.hookspecs import hookimpl\n"
            "@hookimpl\n"
            "def orchard_register(registrar):\n"
            "    registrar.add('environment', 'twice', 'x:Y')\n"
        )
    done = orchard(project, "eval", "run.toml", "--set", "environment.backend=twice", env={"PYTHONPATH": str(site)})
    assert done.returncode == 2
    assert "registered by both first_plugin and second_plugin" in done.stderr


def test_when_no_sandbox_can_be_had_the_run_says_so_and_counts(project: Path) -> None:
    (project / "env.py").write_text(
        "from core_fakes import DictEnvironment\n"
        "from orchard_api.errors import SandboxCreateError\n"
        "class NoRoom(DictEnvironment):\n"
        "    async def create(self, spec, *, sandbox_id):\n"
        "        raise SandboxCreateError('no room')\n"
    )
    done = orchard(project, "eval", "run.toml", "--run-dir", "out", "--set", "environment.backend=env.py:NoRoom")
    assert done.returncode == 1
    assert "no episode could be scored" in done.stderr
    assert "6 x create: SandboxCreateError" in done.stdout
    summary = json.loads((project / "out" / "summary.json").read_text())
    assert summary["failures"]["infra"] == 6
    assert summary["stages"]["eval"]["heldout_success"] is None
    assert summary["incomplete"] is True


def test_some_missing_sandboxes_flag_the_run_incomplete_and_score_the_rest(project: Path) -> None:
    """Case 58."""
    (project / "env.py").write_text(
        "from core_fakes import DictEnvironment\n"
        "from orchard_api.errors import SandboxCreateError\n"
        "class Flaky(DictEnvironment):\n"
        "    async def create(self, spec, *, sandbox_id):\n"
        "        if self.created % 3 == 0:\n"
        "            self.created += 1\n"
        "            raise SandboxCreateError('image failed to pull')\n"
        "        return await super().create(spec, sandbox_id=sandbox_id)\n"
    )
    done = orchard(project, "eval", "run.toml", "--run-dir", "out", "--set", "environment.backend=env.py:Flaky")
    assert done.returncode == 0
    assert "incomplete" in done.stdout
    summary = json.loads((project / "out" / "summary.json").read_text())
    assert summary["failures"]["infra"] == 2
    assert summary["stages"]["eval"]["heldout_success"] == 1.0


def test_a_removal_that_fails_ends_the_command_with_its_id_and_reason(project: Path) -> None:
    """Case 8."""
    (project / "env.py").write_text(
        "from core_fakes import DictEnvironment\n"
        "class Stuck(DictEnvironment):\n"
        "    def __init__(self, config=None):\n"
        "        super().__init__(config)\n"
        "        self.undeletable = True\n"
    )
    done = orchard(project, "eval", "run.toml", "--set", "environment.backend=env.py:Stuck")
    assert done.returncode == 1
    assert re.search(r"sandbox orchard-\w+ could not be removed: .*daemon answered 500", done.stderr)


MARKED = """
import asyncio
from pathlib import Path
from core_fakes import DictEnvironment, Play

class Marked(DictEnvironment):
    async def create(self, spec, *, sandbox_id):
        Path("live", sandbox_id).touch()
        return await super().create(spec, sandbox_id=sandbox_id)

    async def delete(self, sandbox_id):
        self.delete_s = 0.5
        await super().delete(sandbox_id)
        Path("live", sandbox_id).unlink(missing_ok=True)

class SlowToMake(Marked):
    def __init__(self, config=None):
        super().__init__(config)
        self.create_s = 30.0

class Sticky(Marked):
    async def delete(self, sandbox_id):
        await asyncio.sleep(600)

class Slow(Play):
    def __init__(self, config=None):
        super().__init__(config)
        self.seconds = 600.0
"""


@pytest.mark.parametrize(
    ("backend", "signals", "left"),
    [
        ("Marked", [signal.SIGINT], 0),
        ("Marked", [signal.SIGINT, signal.SIGINT], 0),
        ("Marked", [signal.SIGTERM], 0),
        ("SlowToMake", [signal.SIGINT], 0),
        ("Sticky", [signal.SIGINT, signal.SIGINT], 2),
    ],
)
def test_ctrl_c_ends_in_order_with_130_and_no_sandbox(
    project: Path, backend: str, signals: list[signal.Signals], left: int
) -> None:
    """Cases 2 and 3: also twice, also while sandboxes are being made; a backend that hangs is not waited for."""
    (project / "env.py").write_text(MARKED)
    live = project / "live"
    live.mkdir()
    command = [sys.executable, "-m", "orchard_core.cli", "eval", "run.toml", "--run-dir", "out"]
    for override in (f"environment.backend=env.py:{backend}", "harness.name=env.py:Slow"):
        command += ["--set", override]
    env = {**os.environ, "PYTHONPATH": str(FAKES.parent)}
    process = subprocess.Popen(command, cwd=project, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 20
        while len(list(live.iterdir())) < 2:
            assert time.monotonic() < deadline, "no sandbox came up"
            time.sleep(0.05)
        begun = time.monotonic()
        for number in signals:
            process.send_signal(number)
            time.sleep(0.1)
        stdout, stderr = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert time.monotonic() - begun < (6 if len(signals) > 1 else 15)
    assert len(list(live.iterdir())) == left
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    if left:
        assert "some sandboxes may be left" in stderr
    else:
        assert json.loads((project / "out" / "summary.json").read_text())["status"] == "interrupted"
        assert (project / "out" / "report.html").exists(), stdout


def test_a_full_disk_is_one_clear_error_and_what_was_written_can_be_read(project: Path) -> None:
    """The first part of 256 episodes fits, the next does not."""
    big = TASKS.replace("range(6)", "range(262)").replace(
        'instruction="do"', 'instruction="do" if number < 256 else os.urandom(60000).hex()'
    )
    (project / "tasks.py").write_text(big)
    (project / "small").mkdir()
    command = f"{sys.executable} -m orchard_core.cli"
    script = (
        f"mount -t tmpfs -o size=256k tmpfs {project / 'small'} && cd {project} && "
        f"{command} eval run.toml --run-dir small/out --set rollout.concurrency=1; echo code $?; "
        f"{command} report small/out && cp -r small/out kept"
    )
    env = {**os.environ, "PYTHONPATH": str(FAKES.parent)}
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    done = subprocess.run(
        ["unshare", "--mount", *user, "sh", "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert "code 1\n" in done.stdout, done.stdout + done.stderr
    assert "No space left on device" in done.stderr
    assert "free some space" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    from orchard_api.schema import read_episodes

    assert len(list(read_episodes(project / "kept" / "episodes" / "eval"))) == 256
    assert "Episodes to read" in (project / "kept" / "report.html").read_text()


def test_a_bug_is_one_line_and_a_traceback_only_when_asked_for(project: Path) -> None:
    (project / "env.py").write_text(
        "from core_fakes import DictEnvironment\n"
        "class Bug(DictEnvironment):\n"
        "    async def start(self):\n"
        "        raise ZeroDivisionError('one over nothing')\n"
    )
    arguments = ("eval", "run.toml", "--set", "environment.backend=env.py:Bug")
    done = orchard(project, *arguments)
    assert done.returncode == 1
    assert done.stderr == (
        "error: internal error: ZeroDivisionError: one over nothing\n  hint: add --debug for the traceback\n"
    )
    assert not (project / "runs").exists() or list((project / "runs").iterdir()) == []
    for debug in (orchard(project, *arguments, "--debug"), orchard(project, *arguments, env={"ORCHARD_DEBUG": "1"})):
        assert "Traceback" in debug.stderr


def test_a_config_json_of_something_else_does_not_make_a_folder_ours(project: Path) -> None:
    model = project / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["X"]}')
    done = orchard(project, "eval", "run.toml", "--run-dir", "model", "--overwrite")
    assert done.returncode == 2
    assert "not a run's folder" in done.stderr
    assert (model / "config.json").exists()
    assert orchard(project, "report", "model").returncode == 2


def test_two_runs_in_one_second_do_not_meet(project: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(FAKES.parent)}
    command = [sys.executable, "-m", "orchard_core.cli", "eval", "run.toml"]
    both = [subprocess.Popen(command, cwd=project, env=environment, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(30) for process in both] == [0, 0]
    assert len(list((project / "runs").iterdir())) == 2


def test_a_report_is_built_anew(project: Path) -> None:
    assert orchard(project, "eval", "run.toml", "--run-dir", "out").returncode == 0
    page = project / "out" / "report.html"
    before = page.read_text()
    page.unlink()
    done = orchard(project, "report", "out")
    assert done.returncode == 0
    assert "report: out/report.html" in done.stdout
    assert page.read_text() == before


def test_a_terminal_sees_a_live_panel(project: Path) -> None:
    """Through a pseudo-terminal, as `script` makes one."""
    import pty

    code = (
        "import sys; sys.argv = ['orchard', 'eval', 'run.toml', '--run-dir', 'out'];"
        "from orchard_core.cli import main; main()"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(project)
        os.environ.update(PYTHONPATH=str(FAKES.parent), TERM="xterm-256color", COLUMNS="100")
        os.execv(sys.executable, [sys.executable, "-c", code])
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:
        pass
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\u00a0", " ")
    assert "6/6" in text
    assert "success 1.000" in text
    assert "reward 1.000" in text


def test_doctor_fails_where_an_installed_plugin_does_not_load(project: Path) -> None:
    site = project / "site"
    info = site / "broken_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[orchard]\nwonder = broken_plugin\n")
    (site / "broken_plugin.py").write_text("import not_there_at_all\n")
    done = orchard(project, "doctor", env={"PYTHONPATH": str(site)})
    assert done.returncode == 1
    assert "ORCHARD_DISABLE_PLUGINS=wonder" in done.stdout


def test_help_has_examples_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from orchard_core.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0\n"
        "bad = {'torch', 'pyarrow', 'docker', 'kubernetes', 'ray', 'transformers', 'pydantic', 'jinja2'}\n"
        "print(sorted(bad & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for command in ("init", "eval", "train", "plugins", "doctor", "report"):
        assert "Example" in orchard(tmp_path, command, "--help").stdout


def test_doctor_prints_a_line_per_check(tmp_path: Path) -> None:
    done = orchard(tmp_path, "doctor")
    assert done.returncode in (0, 1)
    for name in ("python", "disk", "open files", "temporary folder"):
        assert name in done.stdout
