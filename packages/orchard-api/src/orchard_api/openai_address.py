"""Where an OpenAI-compatible API is, and the options that whoever calls one has in common."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, field_validator

from orchard_api.errors import ConfigError
from orchard_api.registry import PluginConfig

DEFAULT_BASE_URL = "https://api.openai.com/v1"
BASE_URL_VARIABLE = "OPENAI_BASE_URL"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ApiOptions(PluginConfig):
    """Any server that speaks OpenAI's API. Keys come from the environment, never from the run file."""

    base_url: str | None = Field(
        default=None, description=f"with or without /v1; default: ${BASE_URL_VARIABLE}, else {DEFAULT_BASE_URL}"
    )
    model: str | None = Field(default=None, description="model name; may be left out where the server has just one")
    api_key_env: str = Field(default="OPENAI_API_KEY", description="variable that holds the key")
    timeout_s: float = Field(default=120.0, gt=0, description="seconds that one attempt may take")
    connect_timeout_s: float = Field(default=10.0, gt=0)
    max_concurrency: int = Field(default=64, ge=1, description="requests under way at once")
    max_retries: int = Field(default=5, ge=0, description="retries of one request, within its deadline")
    max_tokens_field: str = Field(default="max_tokens", description="some models want max_completion_tokens")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="further fields of each request")

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            raise ValueError("expected the name of an environment variable, not a key")
        return value

    @field_validator("base_url")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is not None:
            normalise_base_url(value)
        return value

    def address(self) -> str:
        """The API's root, from the options, the environment or the default.

        Raises:
            ConfigError: the environment's address is none.
        """
        url = self.base_url or os.environ.get(BASE_URL_VARIABLE) or DEFAULT_BASE_URL
        try:
            return normalise_base_url(url)
        except ValueError as error:
            raise ConfigError(f"${BASE_URL_VARIABLE}: {error}") from None

    def key(self) -> str | None:
        """The key, or None where the variable is unset or empty."""
        return os.environ.get(self.api_key_env) or None


def normalise_base_url(url: str) -> str:
    """The API's root: no trailing slash, no endpoint, and `/v1` where the path names no version.

    Raises:
        ValueError: not an http(s) URL, or one with a user or password in it.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected a URL such as http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError("expected a URL without user and password; put the key into the variable api_key_env names")
    path = re.sub(r"/(chat/completions|completions|models)/*$", "", parts.path).rstrip("/")
    if not re.search(r"/v\d+[a-z0-9]*(/|$)", path):
        path += "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def is_loopback(url: str) -> bool:
    """Whether a URL leads to this machine."""
    host = urlsplit(url).hostname or ""
    return host in LOOPBACK or host.startswith("127.")
