"""The `openai` policy server: an outside endpoint as text, or token in and token out where it can."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from orchard_api.errors import ConfigError, OrchardError, PolicyServerError
from orchard_api.messages import Message
from orchard_api.openai_address import is_loopback
from orchard_api.openai_http import ApiClient, ApiRefusalError
from orchard_api.policy import (
    ChatReply,
    ChatRequest,
    GenerateRequest,
    Generation,
    PolicyInfo,
    PolicyServerContext,
    SamplingParams,
)
from orchard_harnesses.openai_config import OpenAIConfig
from orchard_harnesses.openai_replies import (
    finish_reason,
    first_choice,
    integers,
    model_names,
    sampled_logprobs,
    token_count,
    token_versions,
)

logger = logging.getLogger("orchard_harnesses")


class OpenAIServer:
    """Serves a policy that somebody else runs; it never changes its version."""

    Config = OpenAIConfig

    def __init__(self, config: OpenAIConfig) -> None:
        self._config = config
        self._client: ApiClient | None = None
        self._endpoint: OpenAIEndpoint | None = None

    async def start(self, context: PolicyServerContext) -> None:
        """Read the key, and ask the API for its models.

        Raises:
            ConfigError: no key for an API that isn't on this machine, or no model named.
            PolicyServerError: it can't be reached, or refuses the key.
        """
        config = self._config
        url, key = config.address(), config.key()
        if key is None and not is_loopback(url):
            raise ConfigError(
                f"policies.{context.name}: {url} needs a key, and ${config.api_key_env} is not set",
                hint=f"export {config.api_key_env}=…, or name another variable: api_key_env",
            )
        path = self._model_path(context)
        self._client = ApiClient(config, url=url, key=key)
        try:
            info = PolicyInfo(
                name=context.name,
                model=await self._model(self._client, context.name),
                exact=config.exact,
                context_length=config.context_length,
                model_path=path,
                base_url=url,
            )
        except BaseException:
            await self.aclose()
            raise
        self._endpoint = OpenAIEndpoint(self._client, info, config)

    def _model_path(self, context: PolicyServerContext) -> Path | None:
        path = self._config.model_path or (context.model.path if context.model is not None else None)
        if self._config.exact and path is None:
            raise ConfigError(
                f"policies.{context.name}: exact = true needs the model's tokenizer and chat template",
                hint="set model_path to a folder with tokenizer.json and a chat template",
            )
        return path

    async def _model(self, client: ApiClient, name: str) -> str:
        wanted = self._config.model
        if wanted is not None and not self._config.check_at_start:
            return wanted
        try:
            answer = await client.get("/models", deadline_s=max(self._config.connect_timeout_s, 1.0) * 2)
        except ApiRefusalError as error:
            if error.status in (401, 403) or wanted is None:
                raise
            return wanted
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise client.unreachable(error) from error
        except OrchardError:
            raise
        except Exception:
            if wanted is None:
                raise
            return wanted
        served = model_names(answer)
        if wanted is not None:
            if served and wanted not in served:
                logger.warning(
                    "%s does not list the model %r; it has %s", client.base_url, wanted, ", ".join(served[:10])
                )
            return wanted
        if len(served) != 1:
            names = ", ".join(served[:20]) or "none"
            raise ConfigError(f"policies.{name}.model: name one of the models of {client.base_url}: {names}")
        return served[0]

    def endpoint(self) -> OpenAIEndpoint:
        """Where to send prompts."""
        if self._endpoint is None:
            raise PolicyServerError("the policy server has not been started")
        return self._endpoint

    async def load(self, version: int) -> None:
        """Refuse: the weights are somebody else's."""
        raise PolicyServerError(
            "the openai policy server serves an outside model and can't load weights",
            hint='train with policies.main.server = "in_process"',
        )

    async def aclose(self) -> None:
        """Close the connections; idempotent."""
        client, self._client, self._endpoint = self._client, None, None
        if client is not None:
            await client.aclose()


class OpenAIEndpoint:
    """A policy behind an OpenAI-compatible API."""

    def __init__(self, client: ApiClient, info: PolicyInfo, config: OpenAIConfig) -> None:
        self._client = client
        self._info = info
        self._extra = dict(config.extra_body)
        self._max_tokens_field = config.max_tokens_field
        self._left_out: set[str] = set()

    def __repr__(self) -> str:
        return f"OpenAIEndpoint({self._info.model!r} at {self._info.base_url!r})"

    @property
    def info(self) -> PolicyInfo:
        """What is behind it."""
        return self._info

    async def chat(self, request: ChatRequest) -> ChatReply:
        """See `PolicyEndpoint.chat`."""
        body: dict[str, Any] = {
            "model": self._info.model,
            "messages": [replace(message, reasoning=None).to_openai() for message in request.messages],
            **self._sampling(request.sampling),
        }
        if request.tools:
            body["tools"] = [tool.to_openai() for tool in request.tools]
        answer = await self._post("/chat/completions", body, request.deadline_s)
        choice = first_choice(answer)
        try:
            message = Message.from_openai({"role": "assistant", **choice["message"]})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PolicyServerError(f"the policy server's message can't be read: {error!r}") from error
        usage = answer.get("usage")
        return ChatReply(
            message=message,
            finish_reason=finish_reason(choice),
            prompt_tokens=token_count(usage, "prompt_tokens"),
            completion_tokens=token_count(usage, "completion_tokens"),
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `PolicyEndpoint.generate`; `/v1/completions` with ids, as vLLM and Orchard's in-process server offer it.

        Logprobs must be of the distribution that was sampled from: vLLM needs `--logprobs-mode processed_logprobs`.
        A server that reports no policy versions serves version 0.
        """
        if not self._info.exact:
            raise PolicyServerError(
                f"{self._info.base_url} is used as text (exact = false): it gives no token ids",
                hint="set exact = true if it is vLLM or another server with return_token_ids",
            )
        if request.images:
            raise PolicyServerError("images can't be sent to /v1/completions")
        sent = list(request.prompt_ids)
        body: dict[str, Any] = {
            "model": self._info.model,
            "prompt": sent,
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
            **self._sampling(request.sampling),
        }
        if request.sampling.stop_token_ids:
            body["stop_token_ids"] = list(request.sampling.stop_token_ids)
        answer = await self._post("/completions", body, request.deadline_s)
        choice = first_choice(answer)
        ids = integers(choice.get("token_ids"), "token_ids")
        echoed = choice.get("prompt_token_ids", answer.get("prompt_token_ids"))
        if integers(echoed, "prompt_token_ids") != tuple(sent):
            raise PolicyServerError(
                "the policy server's prompt_token_ids are not the ids that were sent: it tokenised the prompt again"
            )
        logprobs = sampled_logprobs(choice, len(ids))
        versions = token_versions(choice, answer, len(ids))
        return Generation(token_ids=ids, logprobs=logprobs, versions=versions, finish_reason=finish_reason(choice))

    def _sampling(self, sampling: SamplingParams) -> dict[str, Any]:
        fields: dict[str, Any] = {self._max_tokens_field: sampling.max_tokens, "temperature": sampling.temperature}
        if sampling.top_p != 1.0:
            fields["top_p"] = sampling.top_p
        if sampling.seed is not None:
            fields["seed"] = sampling.seed
        return {key: value for key, value in fields.items() if key not in self._left_out} | self._extra

    async def _post(self, path: str, body: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        try:
            answer = await self._client.post(path, body, deadline_s=deadline_s)
        except ApiRefusalError as error:
            adapted = self._adapt(error, body)
            if adapted is None:
                raise
            answer = await self._client.post(path, adapted, deadline_s=deadline_s)
        if not isinstance(answer, dict):
            raise PolicyServerError(f"the policy server answered a {type(answer).__name__}, not an object")
        return answer

    def _adapt(self, error: ApiRefusalError, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The request in the form that a refusal asks for: models differ in which sampling fields they take."""
        if error.status not in (400, 422) or self._info.exact:
            return None
        if "max_completion_tokens" in error.message and self._max_tokens_field == "max_tokens":
            self._max_tokens_field = "max_completion_tokens"
            logger.warning("%s wants max_completion_tokens; used from now on", self._info.model)
            adapted = dict(body)
            adapted["max_completion_tokens"] = adapted.pop("max_tokens")
            return adapted
        if error.parameter in ("temperature", "top_p", "seed") and error.parameter in body:
            self._left_out.add(error.parameter)
            logger.warning("%s does not take %s; left out from now on", self._info.model, error.parameter)
            return {key: value for key, value in body.items() if key != error.parameter}
        return None
