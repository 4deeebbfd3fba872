"""Options of the `openai` policy server."""

from __future__ import annotations

from pydantic import Field

from orchard_api.config import RunPath
from orchard_api.openai_address import ApiOptions


class OpenAIConfig(ApiOptions):
    """A policy at any server that speaks OpenAI's API. Keys come from the environment, never from the run file."""

    exact: bool = Field(
        default=False, description="token ids in and out through /v1/completions (vLLM, Orchard's own server)"
    )
    model_path: RunPath | None = Field(
        default=None, description="folder with tokenizer and chat template, for exact; default: the run's model"
    )
    context_length: int | None = Field(default=None, ge=1, description="tokens of prompt and response together")
    check_at_start: bool = Field(default=True, description="ask for /models before anything starts")
