"""Run the fenced blocks of a Markdown page, in order, in one folder.

* `python` runs in a process of its own; an `output` block right after it is its expected stdout.
* `console` lines that begin with `$ ` run in one bash; the lines between are the expected output.
* `toml file=NAME`, `python file=NAME`, ... is written to NAME (relative) instead of run; TOML must parse.
* `text`, `output`, `mermaid` are only shown.
* `<!-- not run: REASON -->` on the line before a block leaves it out.

In expected output `...` stands for any text, as in doctest.
"""

from __future__ import annotations

import difflib
import doctest
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

SHOWN = {"text", "output", "mermaid"}
ELLIPSIS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block: language, `key=value` options, text, and its first line in the page."""

    language: str
    options: Mapping[str, str]
    text: str
    line: int
    skipped: bool


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    found = []
    skip = False
    for token in MarkdownIt().parse(page.read_text("utf-8")):
        if token.type == "html_block":
            skip = bool(re.match(r"<!-- not run: \w", token.content))
        elif token.type == "fence":
            language, *rest = token.info.split() or [""]
            options = dict(part.split("=", 1) for part in rest)
            line = (token.map or [0])[0] + 1
            found.append(Block(language=language, options=options, text=token.content, line=line, skipped=skip))
            skip = False
    return found


def run_page(page: Path, folder: Path, environment: Mapping[str, str]) -> int:
    """Run a page's blocks and return how many ran.

    Raises:
        AssertionError: a block failed or printed something else; names page and line.
    """
    found = blocks(page)
    ran = 0
    for number, block in enumerate(found):
        where = f"{page.name}:{block.line}"
        if block.skipped or block.language in SHOWN:
            continue
        if "file" in block.options:
            target = folder / block.options["file"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
            if block.language == "toml":
                tomllib.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "python":
            expected = found[number + 1] if number + 1 < len(found) else None
            done = _run([sys.executable, "-c", block.text], folder, environment)
            assert done.returncode == 0, f"{where} failed:\n{done.stdout}{done.stderr}"
            if expected is not None and expected.language == "output":
                _compare(where, expected.text, done.stdout)
        elif block.language == "console":
            _run_console(where, block.text, folder, environment)
        else:
            raise AssertionError(f"{where}: language {block.language!r} is neither run nor shown")
        ran += 1
    return ran


def _run_console(where: str, text: str, folder: Path, environment: Mapping[str, str]) -> None:
    for command, expected in _commands(text):
        done = _run(["bash", "-c", command], folder, environment)
        output = done.stdout + done.stderr
        assert done.returncode == 0 or expected, f"{where}: `{command}` exited {done.returncode}:\n{output}"
        if expected:
            _compare(f"{where}: `{command}`", expected, output)


def _commands(text: str) -> Iterator[tuple[str, str]]:
    command: str | None = None
    expected: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command, "\n".join(expected)
            command, expected = line[2:], []
        elif command is not None and command.endswith("\\"):
            command += "\n" + line
        else:
            expected.append(line)
    if command is not None:
        yield command, "\n".join(expected)


def _run(argv: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    variables |= {"COLUMNS": "100", "TERM": "dumb", **environment}
    return subprocess.run(argv, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)


def _compare(where: str, expected: str, got: str) -> None:
    if not doctest.OutputChecker().check_output(expected.strip() + "\n", got.strip() + "\n", ELLIPSIS):
        difference = "\n".join(difflib.ndiff(expected.strip().splitlines(), got.strip().splitlines()))
        raise AssertionError(f"{where} printed something else:\n{difference}")
