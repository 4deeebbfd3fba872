"""The `orchard` command. What a command needs is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from orchard_api.config import RunConfig
    from orchard_api.registry import Registry
    from orchard_core.run_dir import RunDir

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="orchard",
    help="Train and evaluate LLM agents in real, isolated environments.",
    epilog="\b\nExamples:\n  orchard init demo\n  orchard eval demo/run.toml --set policies.main.model=MODEL\n"
    "  orchard train recipes/quickstart/run.toml\n\n"
    "Exit codes: 0 done, 1 the run failed, 2 usage or config, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="the run file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="change one value of the run file; repeatable"),
]
RunDirOption = Annotated[Path | None, typer.Option("--run-dir", help="folder of the run; runs/NAME-TIME by default")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an existing run in that folder")]
Plain = Annotated[bool, typer.Option("--plain", help="plain progress lines also on a terminal")]
Debug = Annotated[bool, typer.Option("--debug", envvar="ORCHARD_DEBUG", help="show tracebacks and log lines")]


@app.command(epilog="\b\nExample:\n  orchard init demo")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="made if missing")] = Path("orchard-demo"),
    debug: Debug = False,
) -> None:
    """Write a run file and a first task for `orchard eval`."""
    from orchard_core.init import write_project

    def work() -> int:
        files = write_project(folder)
        for file in files:
            typer.echo(f"wrote {file}")
        run_file = folder / "run.toml"
        typer.echo(
            "\nnext, with OPENAI_BASE_URL and OPENAI_API_KEY of any OpenAI-compatible endpoint:\n"
            f"  orchard eval {run_file} --set policies.main.model=MODEL\n"
            "or, to see that the task can be solved here, without a model:\n"
            f"  orchard eval {run_file} --set harness='{{name=\"scripted\"}}'"
        )
        return OK

    _guarded(work, debug)


@app.command(
    "eval",
    epilog="\b\nExamples:\n  orchard eval run.toml\n"
    "  orchard eval run.toml --set policies.main.model=MODEL --set evaluation.attempts=4\n"
    "  orchard eval run.toml --set environment.backend=docker --run-dir runs/on-docker",
)
def evaluate(
    run_file: RunFile,
    set_: Overrides = None,
    run_dir: RunDirOption = None,
    overwrite: Overwrite = False,
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Play tasks and report how many were solved."""
    _guarded(lambda: _run(run_file, set_, run_dir, overwrite=overwrite, plain=plain, training=False), debug)


@app.command(
    epilog="\b\nExamples:\n  orchard train recipes/quickstart/run.toml\n"
    "  orchard train recipes/quickstart/run.toml --set seed=1 --run-dir runs/seed-1"
)
def train(
    run_file: RunFile,
    set_: Overrides = None,
    run_dir: RunDirOption = None,
    overwrite: Overwrite = False,
    plain: Plain = False,
    debug: Debug = False,
) -> None:
    """Run all stages: distil, fine-tune, RL, measure."""
    _guarded(lambda: _run(run_file, set_, run_dir, overwrite=overwrite, plain=plain, training=True), debug)


@app.command(epilog="\b\nExample:\n  orchard report runs/quickstart")
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="folder of a run")], debug: Debug = False
) -> None:
    """Build a run's report.html and print its numbers.

    Works on a run that was cut short, too.
    """

    def work() -> int:
        from orchard_core.report import write_report
        from orchard_core.tables import print_summary

        page = write_report(run_dir)
        print_summary(_console(), run_dir)
        typer.echo(f"report: {page}")
        return OK

    _guarded(work, debug)


@app.command(
    epilog="\b\nExamples:\n  orchard plugins\n  ORCHARD_DISABLE_PLUGINS=docker orchard plugins\n"
    "  ORCHARD_TRACE_PLUGINS=1 orchard plugins"
)
def plugins(debug: Debug = False) -> None:
    """List plugins: kind, name, package, version, state."""

    def work() -> int:
        from orchard_core.tables import print_plugins

        print_plugins(_console(), _registry())
        return OK

    _guarded(work, debug)


@app.command(epilog="\b\nExample:\n  orchard doctor")
def doctor(debug: Debug = False) -> None:
    """Say what works here, and the command that fixes the rest.

    Exits with 1 where something that a plugin must have is missing.
    """

    def work() -> int:
        from orchard_api.plugins import plugin_host
        from orchard_core.doctor import own_checks
        from orchard_core.tables import print_doctor

        checks = [("orchard-core", check) for check in own_checks(_registry())] + plugin_host().doctor()
        print_doctor(_console(), checks)
        return FAILED if any(check.required and not check.ok for _, check in checks) else OK

    _guarded(work, debug)


def main() -> None:
    """Entry point of the `orchard` script."""
    app()


def _registry() -> Registry:
    import warnings

    from orchard_api.plugins import plugin_host

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        host = plugin_host()
    for broken in host.registry.broken:
        typer.echo(
            f"warning: plugin {broken.name!r} of {broken.distribution} failed to load: {broken.cause!r}", err=True
        )
    return host.registry


def _console() -> Any:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160)


def _run(
    run_file: Path, overrides: list[str] | None, path: Path | None, *, overwrite: bool, plain: bool, training: bool
) -> int:
    from orchard_api.config import load_run
    from orchard_core.run_dir import RunDir

    registry = _registry()
    config = load_run(run_file, registry, overrides=overrides or ())
    folder = RunDir.create(config, path=path, overwrite=overwrite)
    try:
        return _play(config, registry, folder, plain=plain, training=training)
    finally:
        folder.discard_if_unused()


def _play(config: RunConfig, registry: Registry, folder: RunDir, *, plain: bool, training: bool) -> int:
    from orchard_api.errors import OrchardError
    from orchard_core import driver
    from orchard_core.progress import LiveProgress, PlainProgress
    from orchard_core.run_dir import SUMMARY
    from orchard_core.signals import run_until_interrupted

    console = _console()
    action: Callable[..., Any] = driver.train if training else driver.evaluate
    console.print(f"run folder: {folder.path}", highlight=False, markup=False, soft_wrap=True)
    progress: Any = LiveProgress(console) if console.is_terminal and not plain else PlainProgress(console)
    failure: Exception | None = None
    interrupted = False
    with progress:
        try:
            run_until_interrupted(lambda: action(config, registry, folder, progress))
        except KeyboardInterrupt as stop:
            interrupted = True
            if stop.__cause__ is not None:
                typer.echo(f"while it was interrupted: {stop.__cause__}", err=True)
        except (OrchardError, OSError) as error:
            failure = error
    summary = folder.read_json(SUMMARY)
    if summary:
        _tell(console, folder)
    for sandbox_id, reason in summary.get("undeleted_sandboxes", {}).items():
        typer.echo(f"error: sandbox {sandbox_id} could not be removed: {reason}", err=True)
    if failure is not None:
        raise failure
    if interrupted:
        typer.echo("interrupted; what was played until then is in the run folder", err=True)
        return INTERRUPTED
    return FAILED if summary.get("undeleted_sandboxes") else OK


def _tell(console: Any, folder: RunDir) -> None:
    from orchard_core.report import write_report
    from orchard_core.tables import print_summary

    print_summary(console, folder.path)
    try:
        page = write_report(folder.path)
    except OSError as error:
        typer.echo(f"warning: no report was written: {error}", err=True)
    else:
        console.print(f"report: {page}", highlight=False, markup=False, soft_wrap=True)


def _guarded(work: Callable[[], int], debug: bool) -> NoReturn:
    """Run a command's work; errors become one message, and a traceback only with --debug."""
    from orchard_api.errors import CapabilityError, ConfigError, OrchardError, PluginError, TaskError

    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        code = work()
    except (ConfigError, PluginError, TaskError, CapabilityError) as error:
        code = _complain(error, USAGE, debug)
    except OrchardError as error:
        code = _complain(error, FAILED, debug)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as error:
        code = _complain(error, FAILED, debug)
    except Exception as error:
        wrapped = OrchardError(f"internal error: {type(error).__name__}: {error}", hint="add --debug for the traceback")
        wrapped.__cause__ = error
        code = _complain(wrapped, FAILED, debug)
    sys.stdout.flush()
    raise typer.Exit(code)


def _complain(error: BaseException, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    text = str(error)
    if isinstance(error, OSError) and not hasattr(error, "hint"):
        import errno

        text = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        if error.errno == errno.ENOSPC:
            text += "\n  hint: free some space; what was written until then can be read: orchard report RUN_DIR"
    typer.echo(f"error: {text}", err=True)
    return code


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
