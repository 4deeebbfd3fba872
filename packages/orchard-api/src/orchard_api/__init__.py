"""Protocols, data models, run files and plugin loading: what a plugin author needs of Orchard."""

from orchard_api.environment import Capabilities, Environment
from orchard_api.episode import Episode, HarnessResult, Score
from orchard_api.errors import Failure, FailureClass, OrchardError
from orchard_api.harness import Harness
from orchard_api.hookspecs import DoctorCheck, hookimpl
from orchard_api.messages import Message, Tool, ToolCall
from orchard_api.policy import (
    ChatReply,
    ChatRequest,
    GenerateRequest,
    Generation,
    PolicyEndpoint,
    PolicyInfo,
    PolicyServer,
    SamplingParams,
)
from orchard_api.registry import PluginConfig, Registrar
from orchard_api.reward import Reward
from orchard_api.sandbox import (
    ExecResult,
    FileInfo,
    NetworkRule,
    Resources,
    Sandbox,
    SandboxInfo,
    SandboxSpec,
)
from orchard_api.task import Check, Solution, SolutionStep, Task, Taskset
from orchard_api.training import Batch, Row, Trainer, UpdateReport
from orchard_api.trajectory import Trajectory, Turn
from orchard_api.transport import ByteStream, Transport

__all__ = [
    "Batch",
    "ByteStream",
    "Capabilities",
    "ChatReply",
    "ChatRequest",
    "Check",
    "DoctorCheck",
    "Environment",
    "Episode",
    "ExecResult",
    "Failure",
    "FailureClass",
    "FileInfo",
    "GenerateRequest",
    "Generation",
    "Harness",
    "HarnessResult",
    "Message",
    "NetworkRule",
    "OrchardError",
    "PluginConfig",
    "PolicyEndpoint",
    "PolicyInfo",
    "PolicyServer",
    "Registrar",
    "Resources",
    "Reward",
    "Row",
    "SamplingParams",
    "Sandbox",
    "SandboxInfo",
    "SandboxSpec",
    "Score",
    "Solution",
    "SolutionStep",
    "Task",
    "Taskset",
    "Tool",
    "ToolCall",
    "Trainer",
    "Trajectory",
    "Transport",
    "Turn",
    "UpdateReport",
    "hookimpl",
]
