"""The model under training or test: where it is served, and how tokens go in and come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from orchard_api.messages import Message, Tool

PolicyVersion = int
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        path: a folder in Hugging Face's layout: `config.json`, `tokenizer.json`, a chat template, and weights
            unless `init` is `random`.
        init: `checkpoint` loads the weights; `random` makes them from `seed`.
    """

    path: Path
    init: Literal["checkpoint", "random"] = "checkpoint"
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a response is sampled.

    Attributes:
        max_tokens: bound on the response, in tokens.
        temperature: 0 for greedy. Logprobs are of the distribution at this temperature.
        top_p: nucleus; what the `rl` stream trains on must be sampled with 1.
        stop_token_ids: ids that end a response besides the model's own end-of-turn ids.
        seed: makes one request repeatable where the engine can.
    """

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """Tokens in. `deadline_s` bounds the whole call, queueing included, in seconds."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    deadline_s: float = 120.0
    request_id: str = ""
    images: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Tokens out, exactly as the engine sampled them.

    Attributes:
        token_ids: the sampled ids; a stop id that ended the response is its last.
        logprobs: one per id, under the distribution that it was sampled from.
        versions: one policy version per id.
        finish_reason: `stop` (a stop id was sampled), `length`, or `abort`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[PolicyVersion, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"ids, logprobs and versions differ in length: "
                f"{len(self.token_ids)}, {len(self.logprobs)}, {len(self.versions)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """Text in, for endpoints that don't speak tokens."""

    messages: Sequence[Message]
    sampling: SamplingParams
    tools: Sequence[Tool] = ()
    deadline_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReply:
    """Text out; token counts as the endpoint reports them (0 where it doesn't)."""

    message: Message
    finish_reason: FinishReason
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInfo:
    """What a harness must know of a policy before the first call.

    Attributes:
        name: its role in the run: `main`, `judge`, ...
        model: the name that the endpoint knows it by.
        exact: whether `generate` works: token ids in and out with logprobs. Only exact policies train `rl`.
        context_length: prompt and response together, in tokens; None where unknown.
        model_path: folder with tokenizer and chat template, for exact policies.
        base_url: HTTP address of the same policy, or None when it is only reachable in this process.
        sampling: how the run wants responses sampled; harnesses start from it. The run sets it on the endpoint that
            it hands to them (training and evaluation may differ), a policy server leaves it alone.
    """

    name: str
    model: str
    exact: bool
    context_length: int | None = None
    model_path: Path | None = None
    base_url: str | None = None
    sampling: SamplingParams = SamplingParams()


class PolicyEndpoint(Protocol):
    """A place to send prompts to. Safe for concurrent use."""

    @property
    def info(self) -> PolicyInfo:
        """What is behind it."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample a response, token in, token out. The request is not changed.

        Raises:
            ContextOverflowError: the prompt leaves no room.
            OverloadedError: the queue is full.
            DeadlineError: `deadline_s` ran out.
            PolicyServerError: anything else, an endpoint without token ids included.
        """
        ...

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Sample a response as text.

        Raises:
            ContextOverflowError, OverloadedError, DeadlineError, PolicyServerError: as for `generate`.
        """
        ...


class WeightStore(Protocol):
    """Hands weights from a trainer to policy servers, by version."""

    async def put(self, version: PolicyVersion, weights: Mapping[str, Any]) -> None:
        """Store a version's tensors, names as in the checkpoint; repeating it is harmless."""
        ...

    async def get(self, version: PolicyVersion) -> Mapping[str, Any]:
        """The tensors of a version; they must not be changed.

        Raises:
            KeyError: not stored, or already released.
        """
        ...

    async def latest(self) -> PolicyVersion | None:
        """The newest stored version, or None."""
        ...

    async def release(self, version: PolicyVersion) -> None:
        """Say that nobody needs this version or older ones any more."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyServerContext:
    """What a run gives a policy server at start.

    Attributes:
        name: the policy's role in the run (`main`).
        model: the run's model, or None where the server is an outside endpoint.
        store: where new versions come from, or None when nothing trains.
    """

    name: str
    model: ModelSource | None
    store: WeightStore | None


class PolicyServer(Protocol):
    """Serves one policy: an engine that we run, or an outside endpoint. Built from its config."""

    async def start(self, context: PolicyServerContext) -> None:
        """Bring it up; returns when it answers."""
        ...

    def endpoint(self) -> PolicyEndpoint:
        """Where to send prompts."""
        ...

    async def load(self, version: PolicyVersion) -> None:
        """Swap to a stored version; requests under way go on, and each token keeps its own version.

        Raises:
            PolicyServerError: it serves an outside model, or the swap failed and the old version still serves.
        """
        ...

    async def aclose(self) -> None:
        """Stop serving and free everything; idempotent."""
        ...
