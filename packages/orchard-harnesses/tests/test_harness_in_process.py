"""The recorder on a real engine: Orchard's in-process policy server, directly and through its HTTP API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness_fakes import CHATML, MemorySandbox, make_model, policies

from orchard_api.errors import PluginError
from orchard_api.plugins import PluginHost
from orchard_api.policy import ModelSource, PolicyInfo, PolicyServerContext, SamplingParams
from orchard_api.task import Task
from orchard_harnesses.openai_config import OpenAIConfig
from orchard_harnesses.openai_server import OpenAIServer
from orchard_harnesses.react import ReactConfig, ReactHarness

pytestmark = pytest.mark.real
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 340,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


class Sampled:
    """An endpoint with the sampling of a run."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        self.info: PolicyInfo = replace(endpoint.info, sampling=SamplingParams(max_tokens=12, seed=5))
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, request: Any) -> Any:
        self.prompts.append(tuple(request.prompt_ids))
        return await self._endpoint.generate(request)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Any]:
    try:
        entry = PluginHost().registry.get("policy_server", "in_process")
    except PluginError:
        pytest.skip("pip install orchard-trainer-deepspeed")
    folder = make_model(tmp_path / "m", CHATML)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    served = entry.build(entry.config_model()(port=0))
    source = ModelSource(path=folder, init="random", seed=1)
    await served.start(PolicyServerContext(name="main", model=source, store=None))
    yield served
    await served.aclose()


async def play(endpoint: Any) -> tuple[Sampled, Any]:
    sampled = Sampled(endpoint)
    harness = ReactHarness(ReactConfig(system_prompt="", max_turns=4, max_idle_replies=4))
    result = await harness.run(Task(task_id="t", instruction="list the files"), MemorySandbox(), policies(sampled))
    assert result.failure is None, result.failure
    return sampled, result.trajectory


async def test_what_a_random_model_says_is_kept_token_by_token(server: Any) -> None:
    sampled, trajectory = await play(server.endpoint())
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1, 2]
    for turn, prompt in zip(trajectory.turns, sampled.prompts, strict=True):
        held = () if turn.parent is None else trajectory.full_ids(turn.parent)
        assert prompt == held + turn.prompt_ids
    (segment,) = trajectory.segments()
    assert sum(segment.mask) == sum(segment.exact) == sum(len(turn.response_ids) for turn in trajectory.turns)


async def test_the_same_over_http(server: Any) -> None:
    _, direct = await play(server.endpoint())
    info = server.endpoint().info
    outside = OpenAIServer(OpenAIConfig(base_url=info.base_url, exact=True, model_path=info.model_path))
    await outside.start(PolicyServerContext(name="main", model=None, store=None))
    try:
        _, over_http = await play(outside.endpoint())
    finally:
        await outside.aclose()
    for one, other in zip(direct.turns, over_http.turns, strict=True):
        assert (one.prompt_ids, one.response_ids, one.versions) == (
            other.prompt_ids,
            other.response_ids,
            other.versions,
        )
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
