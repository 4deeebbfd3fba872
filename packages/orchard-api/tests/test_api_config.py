"""Run files: plugin sections are checked by the plugin's own model, and every error has its dotted path."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from orchard_api.config import RunPath, load_run
from orchard_api.errors import ConfigError
from orchard_api.registry import PluginConfig, Registrar, Registry


class SizedConfig(PluginConfig):
    size: int = Field(default=1, ge=1)
    folder: RunPath | None = None


class Thing:
    def __init__(self, config: SizedConfig) -> None:
        self.config = config


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registrar = Registrar(registry, distribution="test-plugins", version="1")
    for kind, name in [
        ("environment", "local"),
        ("harness", "react"),
        ("harness", "scripted"),
        ("reward", "command"),
        ("reward", "exact"),
        ("taskset", "directory"),
        ("rollout", "asyncio"),
        ("policy_server", "openai"),
        ("trainer", "torch"),
        ("advantage", "grpo"),
        ("weight_store", "memory"),
    ]:
        registrar.add(kind, name, f"{__name__}:Thing", config=f"{__name__}:SizedConfig")
    return registry


@pytest.fixture
def load(tmp_path: Path, registry: Registry):
    def run(text: str, *overrides: str):
        path = tmp_path / "demo.toml"
        path.write_text(text)
        return load_run(path, registry, overrides=overrides)

    return run


MINIMAL = '[tasks]\nname = "directory"\nfolder = "tasks"\n'


def test_a_minimal_file_gets_defaults_and_paths_start_at_the_file(load, tmp_path: Path) -> None:
    run = load(MINIMAL)
    assert run.name == "demo"
    assert run.environment.name == "local"
    assert [reward.label for reward in run.rewards] == ["command"]
    assert run.tasks.config.folder == tmp_path / "tasks"
    assert run.trainer is None


def test_set_changes_one_value_and_types_follow_toml(load) -> None:
    text = MINIMAL + '[[rewards]]\nname = "exact"\n'
    run = load(text, "environment.size=3", "name=other", "rewards.0.weight=0.5")
    assert run.environment.config.size == 3
    assert run.environment.name == "local"
    assert run.name == "other"
    assert run.rewards[0].weight == 0.5


def test_all_problems_are_listed_with_dotted_path_and_expectation(load) -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            MINIMAL
            + '[environment]\nbackend = "dcoker"\n[harness]\nname = "react"\nsize = "big"\nspeed = 3\n'
            + '[[rewards]]\nname = "command"\nsize = 0\n'
        )
    text = str(caught.value)
    assert "demo.toml" in text
    assert "environment.backend: unknown environment 'dcoker'; did you mean 'docker'?" in text
    assert "harness.size: input should be a valid integer" in text
    assert "got 'big'" in text
    assert "harness.speed: unknown key" in text
    assert "rewards.0.size: input should be greater than or equal to 1, got '0'" in text


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("seed = 'x'\n" + MINIMAL, r"seed: input should be a valid integer"),
        ("colour = 1\n" + MINIMAL, r"colour: unknown key"),
        ("", r"tasks: field required"),
        ("[tasks", r"is not TOML"),
        ("[tasks]\nsize = 1\n", r"tasks\.name: expected the name of a plugin of kind taskset"),
        (MINIMAL + "[[stages]]\nkind = 'rl'\nname = 'rl'\nsteps = 1\n", r"needs a \[trainer\] section"),
        (MINIMAL + "[[stages]]\nkind = 'dance'\nname = 'x'\n", r"stages\.0.*dance"),
        (
            MINIMAL + "[[stages]]\nkind = 'sft'\nname = 'a'\ndata = 'nothing'\n[trainer]\nname = 'torch'\n",
            r"stages\.0\.data: expected the name of an earlier distil stage",
        ),
        (MINIMAL + "[trainer]\nname = 'torch'\n", r"model: a run with a \[trainer\] needs a \[model\]"),
        (MINIMAL + "[[rewards]]\nname='exact'\n[[rewards]]\nname='exact'\n", r"two are named 'exact'"),
        (MINIMAL + "[[rewards]]\nname='exact'\nweight='much'\n", r"rewards\.0\.weight: expected a number"),
    ],
)
def test_each_kind_of_mistake_says_where_and_what(load, text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(text)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("seed", "not of the form"),
        ("seed.deep=1", "holds a plain value"),
        ("rewards.7.weight=1", "entries count from 0"),
    ],
)
def test_bad_overrides_are_named(load, override: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load('seed = 1\n[[rewards]]\nname = "exact"\n' + MINIMAL, override)


def test_a_missing_file_says_what_makes_one(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="orchard init makes one"):
        load_run(tmp_path / "none.toml", registry)


def test_the_resolved_config_round_trips_through_its_own_check(load, registry: Registry, tmp_path: Path) -> None:
    from orchard_api.config import check_run

    run = load(MINIMAL + '[environment]\nbackend = "local"\nsize = 4\n')
    again = check_run(run.to_dict(), registry, base=run.base)
    assert again == run


def test_the_expert_has_the_harnesss_options_unless_told_otherwise(load) -> None:
    text = MINIMAL + (
        "[harness]\nname = 'react'\nsize = 7\n[trainer]\nname = 'torch'\n[model]\npath = 'm'\n"
        "[policies.main]\nserver = 'openai'\n[[stages]]\nkind = 'distil'\nname = 'd'\nepisodes = 1\n"
    )
    run = load(text)
    assert (run.expert.name, run.expert.config.size) == ("scripted", 7)
    assert load(text + "[expert]\nsize = 2\n").expert.config.size == 2
