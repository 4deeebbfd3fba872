"""The run file: TOML, checked against the models of the plugins that it selects, errors with the dotted path."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

from orchard_api.errors import ConfigError, PluginError
from orchard_api.registry import Registry

SELECTORS = {"environment": "backend", "policy_server": "server", "rollout": "engine"}
DEFAULTS = {
    "environment": "local",
    "harness": "react",
    "expert": "scripted",
    "rollout": "asyncio",
    "advantage": "grpo",
    "weight_store": "memory",
}
"""What a section selects when it names no plugin, by the section's name."""


def selector(kind: str) -> str:
    """The key that names the plugin in a section of this kind: `backend`, `server`, `engine`, else `name`."""
    return SELECTORS.get(kind, "name")


def _from_run_file(path: Path, info: ValidationInfo) -> Path:
    base = (info.context or {}).get("base")
    return path if base is None else (base / path).resolve()


RunPath = Annotated[Path, AfterValidator(_from_run_file)]
"""A path in a config model, read as seen from the run file's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginChoice:
    """A plugin that the run file selects, with its validated options."""

    kind: str
    name: str
    config: BaseModel

    def build(self, registry: Registry, *, base: Path | None = None) -> Any:
        """Import and make the object."""
        return registry.get(self.kind, self.name, base=base).build(self.config)

    def to_dict(self) -> dict[str, Any]:
        """As it would stand in a run file, defaults filled in."""
        return {selector(self.kind): self.name, **self.config.model_dump(mode="json", exclude_none=True)}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(_Section):
    """`[model]`: the model under training."""

    path: RunPath
    init: Literal["checkpoint", "random"] = "checkpoint"


class SamplingSection(_Section):
    """`[sampling]`: how responses are sampled in rollouts for training."""

    max_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)


class EvaluationSection(_Section):
    """`[evaluation]`: which tasks `orchard eval` plays, and what is measured between training stages."""

    split: str = "heldout"
    tasks: int | None = Field(default=None, ge=1, description="how many tasks; all of a finite split by default")
    attempts: int = Field(default=1, ge=1, description="episodes per task")
    temperature: float | None = Field(default=None, ge=0, description="instead of sampling.temperature")
    solved_at: float = Field(default=1.0, description="a reward of at least this counts as success")


class _Stage(_Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    evaluate: bool = Field(default=True, description="measure the held-out tasks after this stage")
    max_seconds: float | None = Field(default=None, gt=0, description="end the stage after this many seconds")


class EvalStage(_Stage):
    """Measure only."""

    kind: Literal["eval"]


class DistilStage(_Stage):
    """Play an expert (the tasks' own solutions) and keep its episodes."""

    kind: Literal["distil"]
    evaluate: bool = False
    episodes: int = Field(ge=1)
    split: str = "train"
    keep: Literal["solved", "all"] = "solved"


class SftStage(_Stage):
    """Learn from kept episodes by cross entropy."""

    kind: Literal["sft"]
    data: str = Field(description="name of an earlier distil stage, or a Parquet file of episodes")
    epochs: int = Field(default=1, ge=1)
    rows_per_update: int = Field(default=32, ge=1)
    trainer: dict[str, Any] = Field(default_factory=dict, description="trainer options of this stage")


class RlStage(_Stage):
    """Improve by reinforcement learning on fresh episodes."""

    kind: Literal["rl"]
    steps: int = Field(ge=1)
    groups_per_step: int = Field(default=8, ge=1)
    group_size: int = Field(default=8, ge=1)
    split: str = "train"
    trainer: dict[str, Any] = Field(default_factory=dict, description="trainer options of this stage")
    reward_control: Literal["none", "shuffled"] = Field(
        default="none", description="`shuffled` permutes rewards over episodes: a control that must not learn"
    )


Stage = Annotated[EvalStage | DistilStage | SftStage | RlStage, Field(discriminator="kind")]


class _RunFile(_Section):
    """The run file before its plugin sections are checked."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = 0
    output: Path = Path("runs")
    model: ModelSection | None = None
    sampling: SamplingSection = SamplingSection()
    evaluation: EvaluationSection = EvaluationSection()
    stages: tuple[Stage, ...] = ()
    tasks: dict[str, Any]
    environment: dict[str, Any] = Field(default_factory=dict)
    harness: dict[str, Any] = Field(default_factory=dict)
    expert: dict[str, Any] = Field(default_factory=dict)
    rewards: tuple[dict[str, Any], ...] = Field(default=({"name": "command"},), min_length=1)
    policies: dict[str, dict[str, Any]] = Field(default_factory=dict)
    rollout: dict[str, Any] = Field(default_factory=dict)
    trainer: dict[str, Any] | None = None
    advantage: dict[str, Any] = Field(default_factory=dict)
    weight_store: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardChoice:
    """One of `[[rewards]]`: the plugin, its name in the run (`as`, else the plugin's) and its weight."""

    label: str
    weight: float
    plugin: PluginChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run, checked.

    `trainer`, `advantage` and `weight_store` are None when the file has no `[trainer]`.

    Attributes:
        base: the run file's folder; direct plugin references and paths start there.
    """

    name: str
    seed: int
    output: Path
    base: Path
    model: ModelSection | None
    sampling: SamplingSection
    evaluation: EvaluationSection
    stages: tuple[Stage, ...]
    tasks: PluginChoice
    environment: PluginChoice
    harness: PluginChoice
    expert: PluginChoice | None
    rewards: tuple[RewardChoice, ...]
    policies: Mapping[str, PluginChoice]
    rollout: PluginChoice
    trainer: PluginChoice | None
    advantage: PluginChoice | None
    weight_store: PluginChoice | None

    def to_dict(self) -> dict[str, Any]:
        """The resolved config: JSON values, secrets only by the name of their variable."""
        choices = {
            "tasks": self.tasks,
            "environment": self.environment,
            "harness": self.harness,
            "expert": self.expert,
            "rollout": self.rollout,
            "trainer": self.trainer,
            "advantage": self.advantage,
            "weight_store": self.weight_store,
        }
        sections = {"sampling": self.sampling, "evaluation": self.evaluation, "model": self.model}
        return {
            "name": self.name,
            "seed": self.seed,
            "output": str(self.output),
            **{key: value.model_dump(mode="json", exclude_none=True) for key, value in sections.items() if value},
            **{key: choice.to_dict() for key, choice in choices.items() if choice is not None},
            "policies": {name: choice.to_dict() for name, choice in self.policies.items()},
            "rewards": [
                {"as": reward.label, "weight": reward.weight, **reward.plugin.to_dict()} for reward in self.rewards
            ],
            "stages": [stage.model_dump(mode="json", exclude_none=True) for stage in self.stages],
        }


def load_run(path: Path, registry: Registry, *, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file, apply `key.path=value` overrides, and check all of it.

    Raises:
        ConfigError: lists every problem with its dotted path and what was expected there.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"can't read the run file {path}: {error.strerror}", hint="orchard init makes one") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for override in overrides:
        apply_override(raw, override)
    return check_run(raw, registry, base=path.resolve().parent, source=str(path), default_name=path.stem)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Apply one `a.b.0.c=value`; the value is TOML, and plain text where it isn't.

    Raises:
        ConfigError: it has no `=`, or the path leads through a value that has no keys.
    """
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"--set {override!r} is not of the form key.path=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = path.split(".")
    node: Any = raw
    for part in parents:
        try:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        except (ValueError, IndexError):
            raise ConfigError(f"--set {path}: there is no entry {part!r}; entries count from 0") from None
        if not isinstance(node, (dict, list)):
            raise ConfigError(f"--set {path}: {part!r} holds a plain value, not a section")
    if isinstance(node, list):
        try:
            node[int(last)] = value
        except (ValueError, IndexError):
            raise ConfigError(f"--set {path}: there is no entry {last!r}; entries count from 0") from None
    else:
        node[last] = value


def check_run(
    raw: Mapping[str, Any],
    registry: Registry,
    *,
    base: Path,
    source: str = "run file",
    default_name: str = "run",
) -> RunConfig:
    """Check a run given as plain data; see `load_run`."""
    problems: list[str] = []
    try:
        file = _RunFile.model_validate(raw, context={"base": base})
    except ValidationError as error:
        raise ConfigError(_report(source, describe(error))) from None

    def choose(kind: str, path: str, section: Mapping[str, Any]) -> PluginChoice | None:
        try:
            return choose_plugin(kind, section, registry, base=base, path=path, problems=problems)
        except PluginError as error:
            problems.append(f"{path}.{selector(kind)}: {error}")
            return None

    trains = file.trainer is not None
    expert = _inherit(file.harness, file.expert, registry, base)
    needs_expert = any(stage.kind == "distil" for stage in file.stages)
    parts = {
        "tasks": choose("taskset", "tasks", file.tasks),
        "environment": choose("environment", "environment", file.environment),
        "harness": choose("harness", "harness", file.harness),
        "expert": choose("harness", "expert", expert) if needs_expert else None,
        "rollout": choose("rollout", "rollout", file.rollout),
        "trainer": choose("trainer", "trainer", file.trainer) if file.trainer is not None else None,
        "advantage": choose("advantage", "advantage", file.advantage) if trains else None,
        "weight_store": choose("weight_store", "weight_store", file.weight_store) if trains else None,
    }
    policies = {name: choose("policy_server", f"policies.{name}", table) for name, table in file.policies.items()}
    rewards = [_reward(number, table, choose, problems) for number, table in enumerate(file.rewards)]
    problems += _contradictions(file)
    if problems:
        raise ConfigError(_report(source, problems))
    return RunConfig(
        name=file.name or default_name,
        seed=file.seed,
        output=file.output,
        base=base,
        model=file.model,
        sampling=file.sampling,
        evaluation=file.evaluation,
        stages=file.stages,
        policies=policies,  # type: ignore[arg-type]  # a None has left a problem above
        rewards=tuple(rewards),  # type: ignore[arg-type]
        **parts,  # type: ignore[arg-type]
    )


def choose_plugin(
    kind: str,
    section: Mapping[str, Any],
    registry: Registry,
    *,
    base: Path | None,
    path: str,
    problems: list[str],
) -> PluginChoice | None:
    """Narrow one section to the config model of the plugin that it names; problems are appended with full paths.

    Raises:
        PluginError: the plugin is unknown, broken or a duplicate.
    """
    options = dict(section)
    key = selector(kind)
    name = options.pop(key, DEFAULTS.get(path))
    if not isinstance(name, str):
        problems.append(f"{path}.{key}: expected the name of a plugin of kind {kind}, got {name!r}")
        return None
    model = registry.get(kind, name, base=base).config_model()
    try:
        config = model.model_validate(options, context={"base": base, "registry": registry})
    except ValidationError as error:
        problems += describe(error, prefix=path)
        return None
    return PluginChoice(kind=kind, name=name, config=config)


def _inherit(
    harness: Mapping[str, Any], expert: Mapping[str, Any], registry: Registry, base: Path
) -> Mapping[str, Any]:
    """The expert's section, with the harness's values of options that both have.

    What an expert is seen to do must look as what the harness will do; an option given to one alone would teach another
    prompt than the one that is met later.
    """
    try:
        model = registry.get("harness", expert.get("name", DEFAULTS["expert"]), base=base).config_model()
    except (PluginError, AttributeError):
        return expert
    return {**{key: value for key, value in harness.items() if key in model.model_fields}, **expert}


def _reward(number: int, table: Mapping[str, Any], choose: Any, problems: list[str]) -> RewardChoice | None:
    options = dict(table)
    label, weight = options.pop("as", options.get("name")), options.pop("weight", 1.0)
    if not isinstance(label, str):
        problems.append(f"rewards.{number}.as: expected a name, got {label!r}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        problems.append(f"rewards.{number}.weight: expected a number, got {weight!r}")
        return None
    plugin = choose("reward", f"rewards.{number}", options)
    return None if plugin is None else RewardChoice(label=str(label), weight=float(weight), plugin=plugin)


def _contradictions(file: _RunFile) -> list[str]:
    problems = []
    names = [stage.name for stage in file.stages]
    problems += [
        f"stages: the name {name!r} is used twice" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    distilled: set[str] = set()
    for number, stage in enumerate(file.stages):
        if stage.kind == "distil":
            distilled.add(stage.name)
        if stage.kind in ("sft", "rl") and file.trainer is None:
            problems.append(f"stages.{number}: a stage of kind {stage.kind!r} needs a [trainer] section")
        if stage.kind == "sft" and stage.data not in distilled and not stage.data.endswith(".parquet"):
            problems.append(
                f"stages.{number}.data: expected the name of an earlier distil stage or a .parquet file, "
                f"got {stage.data!r}"
            )
    labels = [str(table.get("as", table.get("name"))) for table in file.rewards]
    problems += [
        f'rewards: two are named {label!r}; give one `as = "..."`'
        for label in sorted({x for x in labels if labels.count(x) > 1})
    ]
    if file.trainer is not None and file.model is None:
        problems.append("model: a run with a [trainer] needs a [model] section with a path")
    if file.trainer is not None and "main" not in file.policies:
        problems.append("policies.main: a run with a [trainer] needs the policy server that serves its model")
    return problems


def describe(error: ValidationError, *, prefix: str = "") -> list[str]:
    """One line per problem: dotted path, what was expected, what was given."""
    lines = []
    for detail in error.errors(include_url=False):
        path = ".".join(str(part) for part in (*([prefix] if prefix else []), *detail["loc"]))
        message = detail["msg"][:1].lower() + detail["msg"][1:]
        if detail["type"] == "extra_forbidden":
            message = "unknown key"
        elif detail["type"] != "missing":
            message += f", got {str(detail['input'])[:80]!r}"
        lines.append(f"{path}: {message}")
    return lines


def _report(source: str, problems: Iterable[str]) -> str:
    return f"{source} can't be used:\n" + "\n".join(f"  {line}" for line in problems)
