"""The error model: what failed, whose fault it is, and what to do.

Three classes of failure travel from the sandbox to the trainer's mask (`FailureClass`):

* **policy**: an outcome of the model's own choices (turn limit, context overflow, a wrong answer). It scores.
* **harness**: the program around the model broke. It is masked and counted.
* **infra**: machine, network, image, engine or grader failed. It is retried, then masked and counted.

Harness and infra failures are never a reward of 0, and an infra failure is never text shown to a model. A
non-zero exit, a timeout and an out-of-memory kill inside a sandbox are results (`ExecResult`), not errors;
a sandbox that is gone is an error (`SandboxGone`). Each error's text says what happened, and `hint` what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class FailureClass(StrEnum):
    """Whose fault a failed episode is."""

    POLICY = "policy"
    HARNESS = "harness"
    INFRA = "infra"


class OrchardError(Exception):
    """Base of every error that Orchard raises on purpose.

    Attributes:
        failure: the class of failure this error stands for; None where no episode is concerned.
        hint: what the reader can do about it, or None.
    """

    failure: ClassVar[FailureClass | None] = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(OrchardError):
    """A run file that can't be used; the text names file, dotted key and what was expected."""


class TaskError(OrchardError):
    """A task definition that can't be used."""


class PluginError(OrchardError):
    """Base of the errors about plugins."""


class UnknownPluginError(PluginError):
    """No plugin of that kind and name is known."""


class BrokenPluginError(PluginError):
    """The plugin is installed, but its import or registration failed; `__cause__` has the reason."""


class DuplicatePluginError(PluginError):
    """Two packages register the same kind and name."""


class CapabilityError(OrchardError):
    """A task needs what the backend can't give; raised before anything starts."""


class InfraError(OrchardError):
    """Machine, network, image, engine or grader failed. Safe to retry with a fresh sandbox."""

    failure = FailureClass.INFRA


class SandboxCreateError(InfraError):
    """A sandbox could not be made."""


class StartTimeoutError(SandboxCreateError):
    """A sandbox was made but its agent did not answer within `start_timeout_s`."""


class SandboxGone(InfraError):  # noqa: N818  (the field's word for it)
    """The sandbox no longer exists or no longer answers."""


class SandboxDeleteError(InfraError):
    """A sandbox could not be removed; it stays listed."""


class TransportError(InfraError):
    """The byte stream to a sandbox or a server broke, and the request's fate is unknown."""


class DeadlineError(InfraError):
    """An operation of ours outlived its deadline (not a command's own timeout, which is a result)."""


class OverloadedError(InfraError):
    """A bound was reached (queue, connections, slots); try again later."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class PolicyServerError(InfraError):
    """The policy server failed, or answered what can't be used (token ids missing, for instance)."""


class GraderError(InfraError):
    """A reward could not be computed; the episode is masked, not scored 0."""


class HarnessError(OrchardError):
    """The agent program around the model broke."""

    failure = FailureClass.HARNESS


class ContextOverflowError(OrchardError):
    """The prompt and the asked-for tokens don't fit the model's context window."""

    failure = FailureClass.POLICY

    def __init__(self, *, prompt_tokens: int, context_length: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens; the context window has {context_length}")
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class SandboxRequestError(OrchardError):
    """A sandbox answered a request with a refusal (bad argument, limit, unknown user)."""

    failure = FailureClass.HARNESS


class SandboxFileError(SandboxRequestError):
    """A file operation inside a sandbox was refused.

    Attributes:
        reason: `not_found`, `exists`, `denied`, `not_regular`, `not_directory`, `is_directory`, `not_empty`,
            `no_space`, `too_large` or `other`.
        path: the path inside the sandbox.
    """

    def __init__(self, message: str, *, reason: str, path: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
        self.path = path


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why an episode failed, in a form that is stored and counted.

    Attributes:
        failure_class: whose fault it is.
        kind: the error's type name, such as `SandboxGone`.
        message: for people; bounded to 2,000 characters.
        phase: `create`, `setup`, `harness`, `reward` or `delete`.
    """

    failure_class: FailureClass
    kind: str
    message: str
    phase: str

    @classmethod
    def from_exception(
        cls, error: BaseException, *, phase: str, default: FailureClass = FailureClass.HARNESS
    ) -> Failure:
        """Classify an exception: an Orchard error by its own class, anything else by `default`."""
        own = error.failure if isinstance(error, OrchardError) else None
        text = str(error) or type(error).__name__
        return cls(failure_class=own or default, kind=type(error).__name__, message=text[:2000], phase=phase)
