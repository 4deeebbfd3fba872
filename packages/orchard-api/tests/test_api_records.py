"""What crosses processes can be pickled; messages survive the wire's shape; failures are classified."""

from __future__ import annotations

import pickle

import pytest

from orchard_api.environment import Capabilities
from orchard_api.episode import Episode, Score
from orchard_api.errors import ContextOverflowError, Failure, FailureClass, GraderError, SandboxGone
from orchard_api.messages import ImagePart, Message, TextPart, ToolCall
from orchard_api.policy import Generation, SamplingParams
from orchard_api.rollout import GroupRequest
from orchard_api.sandbox import ExecResult, NetworkRule, Resources, SandboxInfo, SandboxSpec, SandboxState
from orchard_api.task import Check, Solution, SolutionStep, Task
from orchard_api.trajectory import Trajectory


def test_whatever_a_remote_worker_is_sent_or_returns_can_be_pickled() -> None:
    task = Task(
        task_id="t",
        instruction="do",
        check=Check(command="true"),
        solution=Solution(steps=(SolutionStep(commands=("ls",)),)),
    )
    episode = Episode(
        episode_id="e",
        group_id="g",
        task=task,
        trajectory=Trajectory(),
        outcome="submitted",
        scores=(Score(name="s", value=1.0),),
    )
    info = SandboxInfo(sandbox_id="s", state=SandboxState.READY)
    for value in (GroupRequest(group_id="g", task=task), episode, info, SamplingParams(), SandboxSpec()):
        assert pickle.loads(pickle.dumps(value)) == value


def test_a_message_survives_the_wire() -> None:
    message = Message(
        role="assistant",
        content=(TextPart(text="see"), ImagePart(reference="sha256:00")),
        reasoning="hm",
        tool_calls=(ToolCall(id="1", name="shell", arguments='{"command": "ls"}'),),
    )
    assert Message.from_openai(message.to_openai()) == message
    assert Message.from_openai({"role": "user", "content": [{"type": "text", "text": "a"}]}).text == "a"
    assert Message.from_openai({"role": "developer", "content": None}).role == "system"
    with pytest.raises(ValueError, match="unknown role 'wizard'"):
        Message.from_openai({"role": "wizard", "content": ""})


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "[" * 100_000, "null"])
def test_arguments_that_are_no_json_object_parse_to_none(arguments: str) -> None:
    assert ToolCall(id="1", name="x", arguments=arguments).parsed() is None


def test_failures_keep_their_class_and_are_bounded() -> None:
    gone = Failure.from_exception(SandboxGone("box gone"), phase="harness")
    assert (gone.failure_class, gone.kind) == (FailureClass.INFRA, "SandboxGone")
    assert Failure.from_exception(GraderError("x"), phase="reward").failure_class is FailureClass.INFRA
    overflow = ContextOverflowError(prompt_tokens=9, context_length=8)
    assert Failure.from_exception(overflow, phase="harness").failure_class is FailureClass.POLICY
    other = Failure.from_exception(ValueError("x" * 5000), phase="harness")
    assert (other.failure_class, len(other.message)) == (FailureClass.HARNESS, 2000)
    infra = Failure.from_exception(ValueError("x"), phase="create", default=FailureClass.INFRA)
    assert infra.failure_class is FailureClass.INFRA


def test_a_failed_episode_has_no_reward_and_a_scored_one_the_weighted_sum() -> None:
    values = {"episode_id": "e", "group_id": "g", "task": Task(task_id="t", instruction=""), "trajectory": Trajectory()}
    scores = (Score(name="a", value=1.0, weight=0.5), Score(name="b", value=0.5, weight=2.0))
    assert Episode(outcome="submitted", scores=scores, **values).reward == 1.5  # type: ignore[arg-type]
    failure = Failure.from_exception(SandboxGone("x"), phase="reward")
    assert Episode(outcome="failed", scores=scores, failure=failure, **values).reward is None  # type: ignore[arg-type]
    assert Episode(outcome="submitted", **values).reward is None  # type: ignore[arg-type]


def test_missing_capabilities_are_all_listed() -> None:
    spec = SandboxSpec(
        image="debian",
        network=NetworkRule(mode="full"),
        resources=Resources(cpus=0.5, gpus=1),
        architecture="arm64",
        user="nobody",
    )
    assert len(Capabilities().missing(spec)) == 6
    assert Capabilities().missing(SandboxSpec()) == []


def test_a_generation_whose_columns_differ_is_refused() -> None:
    with pytest.raises(ValueError, match="2, 1, 2"):
        Generation(token_ids=(1, 2), logprobs=(-0.1,), versions=(0, 0), finish_reason="stop")


def test_output_views_replace_bad_bytes_and_say_when_cut() -> None:
    result = ExecResult(exit_code=0, stdout=b"\xff\xfeok", stdout_dropped=3)
    assert result.stdout_text == "\ufffd\ufffdok"
    assert result.truncated
    assert result.ok
