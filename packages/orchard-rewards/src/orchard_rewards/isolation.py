"""Keeps what the agent left from deciding how a check runs: environment, home, and files found by looking upwards."""

from __future__ import annotations

import shlex

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Tools read these from any folder above the one that they run in; the folder above ours is world-writable.
_FOUND_UPWARDS = (
    *(".cargo", ".editorconfig", ".env", ".eslintrc.json", ".git", ".mvn", ".npmrc", ".nvmrc", ".pytest.ini"),
    *(".python-version", ".rspec", ".tool-versions", ".venv", ".yarnrc", ".yarnrc.yml", "BUILD", "Cargo.toml"),
    *("Gemfile", "Makefile", "WORKSPACE", "__init__.py", "babel.config.js", "composer.json", "conftest.py", "go.mod"),
    *("go.work", "jest.config.js", "node_modules", "package.json", "pnpm-workspace.yaml", "pom.xml", "pyproject.toml"),
    *("pytest.ini", "settings.gradle", "setup.cfg", "setup.py", "tox.ini", "tsconfig.json", "uv.toml"),
)


def clean_environment(root: str) -> dict[str, str]:
    """Variables of a check; each that makes a program load a file is empty or points into our fresh folder."""
    return {
        "PATH": DEFAULT_PATH,
        "HOME": root,
        "XDG_CONFIG_HOME": f"{root}/.config",
        "XDG_CACHE_HOME": f"{root}/.cache",
        "XDG_DATA_HOME": f"{root}/.local/share",
        "TMPDIR": root,
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "BASH_ENV": "",
        "ENV": "",
        "CDPATH": "",
        "GLOBIGNORE": "",
        "LD_PRELOAD": "",
        "LD_LIBRARY_PATH": "",
        "PYTHONPATH": "",
        "PYTHONSTARTUP": "",
        "PYTHONHOME": "",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": "",
        "PYTEST_PLUGINS": "",
        "NODE_OPTIONS": "",
        "NODE_PATH": "",
        "PERL5OPT": "",
        "PERL5LIB": "",
        "RUBYOPT": "",
        "RUBYLIB": "",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": root,
        "GIT_PAGER": "cat",
        "GIT_CONFIG_COUNT": "3",
        "GIT_CONFIG_KEY_0": "core.hooksPath",
        "GIT_CONFIG_VALUE_0": "/dev/null",
        "GIT_CONFIG_KEY_1": "core.fsmonitor",
        "GIT_CONFIG_VALUE_1": "false",
        "GIT_CONFIG_KEY_2": "safe.directory",
        "GIT_CONFIG_VALUE_2": "*",
    }


def check_script(command: str, *, root: str, folder: str) -> str:
    """The shell text of a check: notes the working directory, moves aside what tools find upwards, and runs it.

    An empty pytest.ini above the check's folder ends what pytest looks for upwards. The shell's builtins do all of it,
    so that the usual case costs no process.
    """
    own, base = shlex.quote(root), shlex.quote(root.rpartition("/")[0])
    lines = [
        "WORKDIR=$PWD; export WORKDIR",
        f": > {own}/pytest.ini || exit 125",
        f"for f in {base}/* {base}/.[!.]*; do",
        '  case "${f##*/}" in',
        f'  {"|".join(_FOUND_UPWARDS)}) mkdir -p {own}/aside && mv "$f" {own}/aside/ || exit 125 ;;',
        "  esac",
        "done; unset f",
        f"cd {shlex.quote(folder)} || exit 125",
        command,
    ]
    return "\n".join(lines)
