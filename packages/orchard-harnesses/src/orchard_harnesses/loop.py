"""The built-in agent loop, shared by `react` and `scripted` so that both see and say exactly the same."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from pydantic import Field

from orchard_api.episode import HarnessResult, Outcome
from orchard_api.errors import (
    ContextOverflowError,
    DeadlineError,
    Failure,
    FailureClass,
    OverloadedError,
)
from orchard_api.messages import Message
from orchard_api.policy import PolicyEndpoint
from orchard_api.registry import PluginConfig
from orchard_api.task import Task
from orchard_harnesses.actions import Malformed, Submit
from orchard_harnesses.formats import ActionFormat, CallFormat, TextFormat
from orchard_harnesses.recorder import Recorder, Reply
from orchard_harnesses.template import ChatTemplate
from orchard_harnesses.tool_parsers import find_parser
from orchard_harnesses.toolbox import Limits, Toolbox


class LoopConfig(PluginConfig):
    """Options of the loop. A run's `react` and its `scripted` expert must have the same."""

    actions: Literal["text", "tool_calls"] = Field(default="text", description="how the model acts")
    system_prompt: str | None = Field(default=None, description="instead of the built-in one; empty for none")
    max_turns: int = Field(default=30, ge=1, description="replies per episode")
    max_idle_replies: int = Field(default=3, ge=1, description="replies in a row without an action that end it")
    nudge: str = Field(
        default="Your reply had no action. Act, or submit when the task is done.",
        description="what the model is told after a reply without an action",
    )
    observation_role: Literal["user", "tool"] = Field(default="user", description="with text actions")
    empty_output: str = Field(default="[no output]", description="what a silent successful command shows")
    shell_timeout_s: float = Field(default=60.0, gt=0, description="seconds per command")
    shell_timeout_limit_s: float = Field(default=300.0, gt=0, description="the most that a tool call may ask for")
    shell_output_bytes: int = Field(default=32_768, ge=64, description="bytes kept of stdout and stderr each")
    max_observation_chars: int = Field(default=16_000, ge=64, description="characters of one action's output")
    max_response_tokens: int | None = Field(default=None, ge=1, description="response tokens of a whole episode")
    request_timeout_s: float = Field(default=300.0, gt=0, description="seconds for one answer of the policy")
    max_retries: int = Field(default=5, ge=0, description="retries of a request that an overloaded policy refused")
    tool_parser: str = Field(default="auto", description="model family that tool calls in sampled text are read as")
    template_options: dict[str, Any] = Field(default_factory=dict, description="passed to the chat template")

    def limits(self) -> Limits:
        """The bounds of actions."""
        return Limits(
            shell_timeout_s=self.shell_timeout_s,
            shell_timeout_limit_s=self.shell_timeout_limit_s,
            shell_output_bytes=self.shell_output_bytes,
            observation_chars=self.max_observation_chars,
            empty_output=self.empty_output,
        )

    def action_format(self, template: ChatTemplate | None) -> ActionFormat:
        """How actions are written.

        Raises:
            ConfigError: tool calls with a template of no known family.
        """
        if self.actions == "text":
            return TextFormat(role=self.observation_role)
        return CallFormat(parser=None if template is None else find_parser(self.tool_parser, template))


class Speaker(Protocol):
    """Whoever answers: a policy or an expert."""

    async def __call__(self, messages: Sequence[Message], *, remaining_s: float, turn: int) -> Reply | Outcome:
        """The next reply, or the outcome when none is left."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """Plays one episode: a reply, its actions, what they gave, the next reply.

    Attributes:
        template: breaks up special tokens in what comes out of the sandbox; None when there is none.
    """

    config: LoopConfig
    task: Task
    recorder: Recorder
    form: ActionFormat
    template: ChatTemplate | None
    speaker: Speaker

    async def play(self, make_toolbox: Callable[[Callable[[], float]], Toolbox]) -> HarnessResult:
        """Play until it is submitted, a limit is reached, or something breaks; what was recorded is always kept."""
        limit = self.task.agent_timeout_s
        end = time.monotonic() + limit
        answer: list[str] = []
        failure: Failure | None = None
        outcome: Outcome = "failed"
        try:
            async with asyncio.timeout(limit if math.isfinite(limit) else None) as scope:
                outcome = await self._turns(make_toolbox(lambda: end - time.monotonic()), answer)
        except ContextOverflowError:
            outcome = "context_overflow"
        except TimeoutError as error:
            if scope.expired():
                outcome = "timeout"
            else:
                failure = Failure.from_exception(error, phase="harness")
        except DeadlineError as error:
            if time.monotonic() >= end - 0.01:
                outcome = "timeout"
            else:
                failure = Failure.from_exception(error, phase="harness")
        except Exception as error:
            failure = Failure.from_exception(error, phase="harness", default=FailureClass.HARNESS)
        return HarnessResult(
            trajectory=self.recorder.trajectory, outcome=outcome, failure=failure, answer="".join(answer)
        )

    async def _turns(self, toolbox: Toolbox, answer: list[str]) -> Outcome:
        prompt = self.config.system_prompt
        prompt = self.form.system_prompt if prompt is None else prompt
        messages = [Message(role="system", content=prompt)] if prompt else []
        messages.append(Message(role="user", content=self.task.instruction))
        idle = 0
        for turn in range(self.config.max_turns):
            reply = await self.speaker(messages, remaining_s=toolbox.remaining_s(), turn=turn)
            if isinstance(reply, str):
                return reply
            messages.append(self.form.history(reply))
            acted = False
            seen = []
            for step in self.form.read(reply):
                if isinstance(step.action, Submit):
                    answer.append(step.action.answer)
                    return "submitted"
                if isinstance(step.action, Malformed):
                    seen.append((step, f"[error] {step.action.problem}"))
                    continue
                acted = True
                seen.append((step, self._neutral(await toolbox.run(step.action))))
            idle = 0 if acted else idle + 1
            if idle >= self.config.max_idle_replies:
                return "stopped"
            messages += self.form.observe(seen) if seen else [Message(role="user", content=self.config.nudge)]
        return "turn_limit"

    def _neutral(self, text: str) -> str:
        return text if self.template is None else self.template.neutralise(text)


@dataclass(slots=True)
class PolicySpeaker:
    """Asks the policy; waits and asks again, within bounds, when it is overloaded."""

    config: LoopConfig
    recorder: Recorder
    endpoint: PolicyEndpoint
    form: ActionFormat
    spent: int = 0

    async def __call__(self, messages: Sequence[Message], *, remaining_s: float, turn: int) -> Reply | Outcome:
        """See `Speaker`."""
        sampling = self.endpoint.info.sampling
        if self.config.max_response_tokens is not None:
            left = self.config.max_response_tokens - self.spent
            if left <= 0:
                return "token_limit"
            sampling = replace(sampling, max_tokens=min(left, sampling.max_tokens))
        end = time.monotonic() + remaining_s
        for attempt in range(self.config.max_retries + 1):
            try:
                reply = await self.recorder.complete(
                    messages,
                    tools=self.form.tools,
                    sampling=sampling,
                    deadline_s=max(min(self.config.request_timeout_s, end - time.monotonic()), 0.001),
                )
            except OverloadedError as error:
                pause = error.retry_after_s
                if pause is None:
                    pause = random.uniform(0.5, 1.0) * min(0.25 * 2**attempt, 15.0)
                if attempt == self.config.max_retries or time.monotonic() + pause >= end:
                    raise
                await asyncio.sleep(pause)
            else:
                self.spent += reply.completion_tokens
                return reply
        raise AssertionError("the last attempt returns or raises")
