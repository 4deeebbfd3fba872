"""The runner of documentation blocks notices what it must."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_blocks import run_page

FENCE = "```"


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text.replace("~~~", FENCE))
    return path


def test_blocks_run_in_order_in_one_folder(tmp_path: Path) -> None:
    text = (
        "~~~toml file=a.toml\nx = 1\n~~~\n"
        "~~~console\n$ cat a.toml\nx = ...\n$ echo b \\\n  > c\n~~~\n"
        "~~~python\nprint(open('c').read())\n~~~\n~~~output\nb\n~~~\n"
    )
    assert run_page(page(tmp_path, text), tmp_path, {}) == 3


@pytest.mark.parametrize(
    "text",
    [
        "~~~python\nprint(1)\n~~~\n~~~output\n2\n~~~\n",
        "~~~python\nraise ValueError\n~~~\n",
        "~~~console\n$ false\n~~~\n",
        "~~~console\n$ echo a\nb\n~~~\n",
        "~~~ruby\nputs 1\n~~~\n",
    ],
)
def test_a_wrong_block_fails(tmp_path: Path, text: str) -> None:
    with pytest.raises(AssertionError):
        run_page(page(tmp_path, text), tmp_path, {})


def test_a_block_marked_as_not_run_needs_a_reason(tmp_path: Path) -> None:
    assert run_page(page(tmp_path, "<!-- not run: takes minutes -->\n~~~console\n$ false\n~~~\n"), tmp_path, {}) == 0
    with pytest.raises(AssertionError):
        run_page(page(tmp_path, "<!-- not run: -->\n~~~console\n$ false\n~~~\n"), tmp_path, {})
