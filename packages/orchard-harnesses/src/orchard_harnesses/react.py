"""The built-in harness: a loop of replies and actions around any policy."""

from __future__ import annotations

from collections.abc import Mapping

from orchard_api.episode import HarnessResult
from orchard_api.errors import Failure, HarnessError, OrchardError
from orchard_api.policy import PolicyEndpoint
from orchard_api.sandbox import Sandbox
from orchard_api.task import Task
from orchard_api.trajectory import Trajectory
from orchard_harnesses.loop import Loop, LoopConfig, PolicySpeaker
from orchard_harnesses.recorder import Recorder
from orchard_harnesses.template_lint import checked_template
from orchard_harnesses.toolbox import Toolbox


class ReactConfig(LoopConfig):
    """Options of `react`."""

    policy: str = "main"


class ReactHarness:
    """Drives `policies[config.policy]`: token in, token out where it is exact, messages elsewhere.

    Attributes:
        needs: the policy that it calls.
    """

    Config = ReactConfig

    def __init__(self, config: ReactConfig) -> None:
        self._config = config
        self._limits = config.limits()
        self.needs: tuple[str, ...] = (config.policy,)

    async def run(self, task: Task, sandbox: Sandbox, policies: Mapping[str, PolicyEndpoint]) -> HarnessResult:
        """Play one episode; see `orchard_api.Harness`."""
        try:
            loop = self._loop(task, policies)
        except OrchardError as error:
            return HarnessResult(
                trajectory=Trajectory(), outcome="failed", failure=Failure.from_exception(error, phase="harness")
            )
        return await loop.play(lambda remaining: Toolbox(sandbox=sandbox, limits=self._limits, remaining_s=remaining))

    def _loop(self, task: Task, policies: Mapping[str, PolicyEndpoint]) -> Loop:
        config = self._config
        endpoint = policies.get(config.policy)
        if endpoint is None:
            raise HarnessError(
                f"the run has no policy {config.policy!r}; it has {', '.join(policies) or 'none'}",
                hint=f'add [policies.{config.policy}], for instance with server = "openai"',
            )
        info = endpoint.info
        template = checked_template(info.model_path) if info.exact and info.model_path is not None else None
        form = config.action_format(template)
        recorder = Recorder(
            endpoint,
            template=template,
            parser=getattr(form, "parser", None),
            options=config.template_options,
            role=config.policy,
        )
        speaker = PolicySpeaker(config=config, recorder=recorder, endpoint=endpoint, form=form)
        return Loop(config=config, task=task, recorder=recorder, form=form, template=template, speaker=speaker)
