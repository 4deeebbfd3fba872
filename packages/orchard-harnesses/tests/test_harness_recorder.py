"""Recorded ids are the engine's, prompts grow out of the ids held, and what does not extend them is a branch."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from harness_fakes import (
    CHATML,
    HERMES,
    STRIPS_REASONING,
    TRIMMING,
    ChatEngine,
    ExactEngine,
    make_model,
    split_into_bytes,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard_api.errors import ContextOverflowError, HarnessError, PolicyServerError
from orchard_api.messages import Message, Tool, ToolCall
from orchard_api.policy import GenerateRequest, Generation, SamplingParams
from orchard_api.trajectory import Trajectory
from orchard_harnesses.recorder import Recorder
from orchard_harnesses.template import ChatTemplate, load_template
from orchard_harnesses.tool_parsers import TOOL_PARSERS

TOOL = Tool(name="shell", description="Run.", parameters={"type": "object", "properties": {}})


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def trained(trajectory: Trajectory) -> list[int]:
    """All ids at mask=1, over all rows."""
    return [
        number
        for segment in trajectory.segments()
        for number, flag in zip(segment.ids, segment.mask, strict=True)
        if flag
    ]


async def talk(recorder: Recorder, texts: list[str]) -> list[Message]:
    messages: list[Message] = []
    for text in texts:
        messages.append(user(text))
        reply = await recorder.complete(messages)
        messages.append(assistant(reply.text))
    return messages


async def test_three_turns_keep_a_non_canonical_split(model_folder: Path) -> None:
    """trl#5224: ids that never were sampled must not be trained on."""
    template = load_template(model_folder)
    says = ["the cat sat", "hello hello world", "the files"]
    assert split_into_bytes(template, says[0]) != template.encode(says[0])
    engine = ExactEngine(model_folder, template, says)
    recorder = Recorder(engine, template=template)
    await talk(recorder, ["the folder", "the mat\n", "list the files"])
    trajectory = recorder.trajectory
    assert [turn.response_ids for turn in trajectory.turns] == engine.sent
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    for earlier, later in zip(range(2), engine.requests[1:], strict=True):
        held = trajectory.full_ids(earlier)
        assert tuple(later.prompt_ids[: len(held)]) == held
    (segment,) = trajectory.segments()
    assert (
        template.decode(segment.ids)
        == template.render(
            [user("the folder"), assistant(says[0]), user("the mat\n"), assistant(says[1]), user("list the files")],
            add_generation_prompt=True,
        )
        + "the files<|im_end|>"
    )
    assert segment.versions[-1] == 3 and all(segment.exact[n] == segment.mask[n] for n in range(len(segment.ids)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_trained_ids_are_the_engines_byte_for_byte(
    data: st.DataObject, model_folder: Path, trimming_folder: Path
) -> None:
    folder = data.draw(st.sampled_from([model_folder, trimming_folder]))
    template = load_template(folder)
    plain = [n for n in range(template.tokenizer.get_vocab_size()) if n not in template.end_ids]
    response = st.lists(st.sampled_from(plain), min_size=1, max_size=12)
    says = [
        tuple(ids) + ((template.end_id,) if ended else ())
        for ids, ended in data.draw(st.lists(st.tuples(response, st.booleans()), min_size=1, max_size=5))
    ]
    seen = data.draw(st.lists(st.text(max_size=20), min_size=len(says), max_size=len(says)))
    engine = ExactEngine(folder, template, says)  # type: ignore[arg-type]
    recorder = Recorder(engine, template=template)
    asyncio.run(_talk_and_discard(recorder, seen))
    trajectory = recorder.trajectory
    assert [turn.response_ids for turn in trajectory.turns] == engine.sent
    assert sorted(trained(trajectory)) == sorted(n for ids in engine.sent for n in ids)
    for turn, request in zip(trajectory.turns, engine.requests, strict=True):
        held = () if turn.parent is None else trajectory.full_ids(turn.parent)
        assert tuple(request.prompt_ids) == held + turn.prompt_ids
    if folder == model_folder:
        assert [turn.parent for turn in trajectory.turns] == [None, *range(len(says) - 1)]


async def _talk_and_discard(recorder: Recorder, texts: list[str]) -> None:
    await talk(recorder, texts)


@pytest.fixture(scope="session")
def trimming_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("trimming"), TRIMMING)


async def test_a_truncated_response_gets_its_end_of_turn_as_context(model_folder: Path) -> None:
    template = load_template(model_folder)
    engine = ExactEngine(model_folder, template, [template.encode("the cat"), "hello"])
    recorder = Recorder(engine, template=template)
    await talk(recorder, ["the mat", "the file"])
    first, second = recorder.trajectory.turns
    assert first.flags == ("truncated",) and first.finish_reason == "length"
    assert template.end_id not in first.response_ids
    assert second.parent == 0 and second.prompt_ids[0] == template.end_id
    (segment,) = recorder.trajectory.segments()
    assert not segment.mask[len(first.prompt_ids) + len(first.response_ids)]


async def test_trained_end_of_turn_tokens_are_the_untruncated_turns(model_folder: Path) -> None:
    """trl#5988: a model that is never trained on the end of a turn never stops."""
    template = load_template(model_folder)
    engine = ExactEngine(model_folder, template, ["the cat", template.encode("the"), "hello"])
    recorder = Recorder(engine, template=template)
    await talk(recorder, ["a", "b", "c"])
    assert trained(recorder.trajectory).count(template.end_id) == 2


async def test_white_space_that_the_template_trims_does_not_make_a_branch(trimming_folder: Path) -> None:
    template = load_template(trimming_folder)
    engine = ExactEngine(trimming_folder, template, ["\n the cat \n", "hello", "world"])
    recorder = Recorder(engine, template=template)
    await talk(recorder, ["a", "b", "c"])
    assert [turn.parent for turn in recorder.trajectory.turns] == [None, 0, 1]
    assert recorder.trajectory.turns[0].response_ids == engine.sent[0]


async def test_a_template_that_strips_reasoning_gives_two_trainable_branches(tmp_path: Path) -> None:
    """verl#6854, prime-rl#1334: split, never crash or merge."""
    folder = make_model(tmp_path / "m", STRIPS_REASONING)
    template = load_template(folder)
    engine = ExactEngine(folder, template, ["<think>hm</think>the cat", "hello", "world"])
    recorder = Recorder(engine, template=template)
    await talk(recorder, ["a", "b", "c"])
    turns = recorder.trajectory.turns
    assert [turn.parent for turn in turns] == [None, None, 1]
    assert turns[1].flags == ("branch",) and len(turns[1].messages) == 3
    assert "hm" not in template.decode(engine.requests[1].prompt_ids)
    segments = recorder.trajectory.segments()
    assert len(segments) == 2
    assert trained(recorder.trajectory) == [n for ids in engine.sent for n in ids]


async def test_rewritten_history_branches_from_the_last_turn_it_extends(model_folder: Path) -> None:
    template = load_template(model_folder)
    engine = ExactEngine(model_folder, template, ["one", "two", "three", "four"])
    recorder = Recorder(engine, template=template)
    messages = await talk(recorder, ["a", "b"])
    await recorder.complete([*messages[:2], user("summary of b"), assistant("fine"), user("c")])
    await recorder.complete([user("a sub-agent's own task")])
    turns = recorder.trajectory.turns
    assert [turn.parent for turn in turns] == [None, 0, 0, None]
    assert [turn.flags for turn in turns] == [(), (), ("branch",), ("branch",)]
    assert turns[2].messages == (user("summary of b"), assistant("fine"), user("c"))
    assert sorted(trained(recorder.trajectory)) == sorted(n for ids in engine.sent for n in ids)


async def test_concurrent_calls_each_find_their_own_parent(model_folder: Path) -> None:
    template = load_template(model_folder)

    class Slow(ExactEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            await asyncio.sleep(0.001 * (3 - len(self.requests)))
            return await super().generate(request)

    engine = Slow(model_folder, template, ["root", "one", "two", "three", "last"])
    recorder = Recorder(engine, template=template)
    start = await talk(recorder, ["a"])
    await asyncio.gather(*(recorder.complete([*start, user(text)]) for text in ("x", "y", "z")))
    turns = recorder.trajectory.turns
    assert [turn.parent for turn in turns] == [None, 0, 0, 0]
    y = next(turn for turn in turns if turn.messages == (user("y"),))
    reply = await recorder.complete([*start, user("y"), y.response, user("more")])
    assert recorder.trajectory.turns[reply.turn].parent == y.index
    assert sorted(trained(recorder.trajectory)) == sorted(n for ids in engine.sent for n in ids)


async def test_tool_calls_written_anew_by_the_template_keep_the_sampled_ids(tmp_path: Path) -> None:
    """verl#3960: the program sends the call back as structure, the template writes it with other white space."""
    folder = make_model(tmp_path / "m", HERMES)
    template = load_template(folder)
    sampled = 'I look.\n<tool_call>{"name":"shell","arguments":{"command":"ls"}}</tool_call>'
    engine = ExactEngine(folder, template, [sampled, "the files", "hello"])
    recorder = Recorder(engine, template=template, parser=TOOL_PARSERS["hermes"])
    first = await recorder.complete([user("a")], tools=[TOOL])
    assert first.message.content == "I look."
    assert first.message.tool_calls == (ToolCall(id="call_0", name="shell", arguments='{"command": "ls"}'),)
    told = [user("a"), first.message, Message(role="tool", content="x", tool_call_id="call_0")]
    second = await recorder.complete(told, tools=[TOOL])
    await recorder.complete([*told, second.message, user("go on")], tools=[TOOL])
    assert [turn.parent for turn in recorder.trajectory.turns] == [None, 0, 1]
    assert recorder.trajectory.turns[0].response_ids == engine.sent[0]


async def test_other_tool_calls_than_sampled_are_a_branch(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", HERMES)
    template = load_template(folder)
    engine = ExactEngine(folder, template, ['<tool_call>{"name":"shell","arguments":{}}</tool_call>', "hello"])
    recorder = Recorder(engine, template=template, parser=TOOL_PARSERS["hermes"])
    await recorder.complete([user("a")], tools=[TOOL])
    forged = Message(role="assistant", tool_calls=(ToolCall(id="call_0", name="shell", arguments='{"x": 1}'),))
    await recorder.complete([user("a"), forged, user("b")], tools=[TOOL])
    assert [turn.parent for turn in recorder.trajectory.turns] == [None, None]


async def test_sampling_params_of_the_caller_do_not_change(model_folder: Path) -> None:
    """verl#6364: the second turn must not lose its budget."""
    template = load_template(model_folder)
    engine = ExactEngine(model_folder, template, ["one", "two"], context_length=120)
    sampling = SamplingParams(max_tokens=100, stop_token_ids=(5,))
    before = dataclasses.asdict(sampling)
    recorder = Recorder(engine, template=template)
    messages = [user("a" * 20)]
    for _ in range(2):
        await recorder.complete(messages, sampling=sampling)
    assert dataclasses.asdict(sampling) == before
    one, two = (request.sampling for request in engine.requests)
    assert one == two
    assert one.max_tokens == 120 - len(engine.requests[0].prompt_ids)
    assert one.stop_token_ids == (5, template.end_id)


async def test_a_prompt_without_room_is_an_overflow_and_nothing_is_sent(model_folder: Path) -> None:
    template = load_template(model_folder)
    engine = ExactEngine(model_folder, template, ["one"], context_length=10)
    recorder = Recorder(engine, template=template)
    with pytest.raises(ContextOverflowError) as caught:
        await recorder.complete([user("the cat sat on the mat")])
    assert caught.value.context_length == 10 and engine.requests == []


BAD = {
    "no token ids": Generation(token_ids=(), logprobs=(), versions=(), finish_reason="stop"),
    "not finite": Generation(token_ids=(9,), logprobs=(float("nan"),), versions=(0,), finish_reason="stop"),
    "aborted": Generation(token_ids=(9,), logprobs=(-1.0,), versions=(0,), finish_reason="abort"),
}


@pytest.mark.parametrize("text", BAD)
async def test_what_an_engine_leaves_out_is_never_filled_in(text: str, model_folder: Path) -> None:
    """rllm#816."""
    template = load_template(model_folder)
    recorder = Recorder(ExactEngine(model_folder, template, [BAD[text]]), template=template)
    with pytest.raises(PolicyServerError, match=text):
        await recorder.complete([user("a")])
    assert recorder.trajectory.turns == ()


def test_an_exact_policy_without_a_template_is_refused(model_folder: Path) -> None:
    with pytest.raises(HarnessError, match="model_path"):
        Recorder(ExactEngine(model_folder, load_template(model_folder), []))


async def test_a_text_endpoint_is_recorded_as_messages() -> None:
    engine = ChatEngine(["one", Message(role="assistant", content="two", reasoning="hm"), "three"])
    recorder = Recorder(engine)
    messages: list[Message] = []
    for text in ("a", "b", "c"):
        messages.append(user(text))
        reply = await recorder.complete(messages)
        messages.append(assistant(reply.message.text))
    turns = recorder.trajectory.turns
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert not any(turn.exact or turn.response_ids or turn.prompt_ids for turn in turns)
    assert turns[1].response.reasoning == "hm" and turns[1].messages == (user("b"),)
    assert trained(recorder.trajectory) == []


def test_an_experts_reply_is_tokenised_once_and_is_not_exact(model_folder: Path) -> None:
    template = load_template(model_folder)
    recorder = Recorder(None, template=template)
    messages = [user("the mat")]
    for text in ("<shell>ls</shell>", "<submit/>"):
        recorder.add_expert(messages, text)
        messages += [assistant(text), user("the files")]
    turns = recorder.trajectory.turns
    assert [turn.parent for turn in turns] == [None, 0]
    for turn, text in zip(turns, ("<shell>ls</shell>", "<submit/>"), strict=True):
        assert turn.response_ids == (*template.encode(text), template.end_id)
        assert not turn.exact and turn.versions == () and turn.flags == ("expert",)
    (segment,) = recorder.trajectory.segments()
    rendered = template.render(messages[:-1])
    assert segment.ids == tuple(template.encode(rendered))[: len(segment.ids)]
    assert not any(segment.exact) and sum(segment.mask) == sum(len(turn.response_ids) for turn in turns)


def test_text_that_the_tokenizer_cannot_hold_is_flagged(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = load_template(model_folder)
    monkeypatch.setattr(ChatTemplate, "decode", lambda self, ids: "something else")
    recorder = Recorder(None, template=template)
    recorder.add_expert([user("a")], "the cat")
    assert recorder.trajectory.turns[0].flags == ("expert", "lossy_tokenization")


async def test_recorders_of_two_policies_share_one_trajectory(model_folder: Path) -> None:
    template = load_template(model_folder)
    turns: list = []
    main = Recorder(ExactEngine(model_folder, template, ["one", "two"]), template=template, turns=turns)
    judge = Recorder(ChatEngine(["fine"]), role="judge", turns=turns)
    messages = await talk(main, ["a"])
    await judge.complete([user("is it good?")])
    await main.complete([*messages, user("b")])
    assert [(turn.policy, turn.parent) for turn in main.trajectory.turns] == [
        ("main", None),
        ("judge", None),
        ("main", 0),
    ]


async def test_a_cancelled_call_records_nothing(model_folder: Path) -> None:
    template = load_template(model_folder)

    class Hanging(ExactEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            await asyncio.sleep(60)
            raise AssertionError

    recorder = Recorder(Hanging(model_folder, template, []), template=template)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await recorder.complete([user("a")])
    assert recorder.trajectory.turns == ()


def test_a_long_conversation_costs_only_its_new_text(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = load_template(model_folder)
    encoded: list[int] = []
    original = ChatTemplate.encode
    monkeypatch.setattr(ChatTemplate, "encode", lambda self, text: encoded.append(len(text)) or original(self, text))
    engine = ExactEngine(model_folder, template, [[*split_into_bytes(template, "hello"), template.end_id]] * 40)
    asyncio.run(_talk_and_discard(Recorder(engine, template=template), ["the cat sat on the mat"] * 40))
    assert max(encoded[1:]) < 120
    assert CHATML in template.source


async def test_an_answer_that_the_template_always_rewrites_is_a_branch(tmp_path: Path) -> None:
    """It keeps prefixes of its own rendering, but not what was sampled."""
    source = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    folder = make_model(tmp_path / "m", source)
    template = load_template(folder)
    engine = ExactEngine(folder, template, ["<think>hm</think>the cat", "hello"])
    recorder = Recorder(engine, template=template)
    await talk(recorder, ["a", "b"])
    assert [turn.parent for turn in recorder.trajectory.turns] == [None, None]
