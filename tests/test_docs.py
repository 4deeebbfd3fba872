"""Every code block of the READMEs and of docs/ runs, with a stand-in for a model's API where one is called."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import run_page
from model_api import ModelApi

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = (
    "README.md",
    "CONTRIBUTING.md",
    "packages/*/README.md",
    "packages/*/docs/**/*.md",
    "docs/**/*.md",
    "recipes/**/README.md",
)
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, model_api: ModelApi) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    variables = {"OPENAI_BASE_URL": model_api.base_url, "OPENAI_API_KEY": "sk-test-of-the-docs"}
    run_page(page, tmp_path, {**variables, "HOME": str(tmp_path)})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_generated_reference_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
