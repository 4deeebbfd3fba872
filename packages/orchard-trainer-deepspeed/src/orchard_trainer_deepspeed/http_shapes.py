"""What requests and answers look like on the wire. Nothing of a request's body is ever changed."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchard_api.messages import Message
from orchard_api.policy import GenerateRequest, Generation, PolicyInfo, SamplingParams
from orchard_trainer_deepspeed.chat import RequestError, TextCodec
from orchard_trainer_deepspeed.engine import ActiveRequest

DEADLINE_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRequest:
    """A body, understood.

    Attributes:
        generate: the request for the engine.
        logprobs: whether the answer lists them.
        token_ids: whether the answer lists ids and versions.
        skip_special: whether text leaves special tokens out.
        stream, usage: whether the answer comes in pieces, and whether the last one counts tokens.
        id, created: of the answer.
    """

    generate: GenerateRequest
    logprobs: bool
    token_ids: bool
    skip_special: bool
    stream: bool
    usage: bool
    id: str
    created: int


class Shape(ABC):
    """One of the two APIs.

    Args:
        codec: tokenizer and template, where the model has them.
        info: the model.
    """

    kind: str
    kind_of_piece: str
    prefix: str
    default_tokens: int | None

    def __init__(self, codec: TextCodec | None, info: PolicyInfo) -> None:
        self._codec = codec
        self._info = info

    def parse(self, body: Any) -> ParsedRequest:
        """Read a request's body.

        Raises:
            RequestError: a field is missing, wrong, or asks for what isn't served.
        """
        if not isinstance(body, dict):
            raise RequestError("the body is not a JSON object")
        for name, plain in (("n", 1), ("best_of", 1), ("echo", False), ("suffix", None), ("use_beam_search", False)):
            if body.get(name, plain) not in (plain, None):
                raise RequestError(f"{name} = {body[name]!r} is not served here")
        prompt = self.prompt(body)
        limit = _number(body, "max_completion_tokens", None) or _number(body, "max_tokens", self.default_tokens)
        context = self._info.context_length or 1 << 30
        sampling = SamplingParams(
            max_tokens=max(1, context - len(prompt)) if limit is None else int(limit),
            temperature=float(_number(body, "temperature", 1.0)),
            top_p=float(_number(body, "top_p", 1.0)),
            stop_token_ids=(*_ids(body.get("stop_token_ids") or [], "stop_token_ids"), *self._stops(body.get("stop"))),
            seed=None if (seed := _number(body, "seed", None)) is None else int(seed),
        )
        options = body.get("stream_options")
        return ParsedRequest(
            generate=GenerateRequest(
                prompt_ids=prompt, sampling=sampling, deadline_s=float(_number(body, "deadline_s", DEADLINE_S))
            ),
            logprobs=self.wants_logprobs(body),
            token_ids=bool(body.get("return_token_ids", False)),
            skip_special=bool(body.get("skip_special_tokens", True)),
            stream=bool(body.get("stream", False)),
            usage=isinstance(options, dict) and bool(options.get("include_usage")),
            id=f"{self.prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
        )

    def _stops(self, value: Any) -> list[int]:
        """Stop strings that are one token each."""
        found = []
        for text in [value] if isinstance(value, str) else value or []:
            ids = self._codec.encode(text) if self._codec is not None and isinstance(text, str) else []
            if len(ids) != 1:
                raise RequestError(f"stop = {text!r} is not one token of this model; use stop_token_ids")
            found += ids
        return found

    def whole(self, parsed: ParsedRequest, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""
        choice = self._choice(parsed, generation, first=True)
        choice["finish_reason"] = generation.finish_reason
        answer = {**self._frame(parsed, self.kind), "choices": [choice]}
        answer["usage"] = _usage(parsed, len(generation.token_ids))
        if parsed.token_ids:
            answer["prompt_token_ids"] = list(parsed.generate.prompt_ids)
        return answer

    def pieces(self, parsed: ParsedRequest, active: ActiveRequest, sent: int, count: int) -> Iterator[dict[str, Any]]:
        """The events for tokens `sent` to `count - 1`; the last token's also say how it ended."""
        done = active.finish is not None and count == len(active.ids)
        part = Generation(
            token_ids=tuple(active.ids[sent:count]),
            logprobs=tuple(active.logprobs[sent:count]),
            versions=tuple(active.versions[sent:count]),
            finish_reason=(active.finish or "stop") if done else "stop",
        )
        before = self._text(parsed, active.ids[:sent], ended=False)
        after = self._text(parsed, active.ids[:count], ended=done and active.finish == "stop")
        # Half of a character waits for its other half.
        before, after = before.rstrip("\ufffd"), after if done else after.rstrip("\ufffd")
        choice = self.piece(after[len(before) :], first=sent == 0)
        choice |= {"index": 0, "logprobs": self.logprobs(part) if parsed.logprobs else None}
        choice |= self._exact(parsed, part, first=sent == 0)
        choice["finish_reason"] = active.finish if done else None
        yield {**self._frame(parsed, self.kind_of_piece), "choices": [choice]}
        if done and parsed.usage:
            usage = _usage(parsed, len(active.ids))
            yield {**self._frame(parsed, self.kind_of_piece), "choices": [], "usage": usage}

    def _choice(self, parsed: ParsedRequest, generation: Generation, *, first: bool) -> dict[str, Any]:
        text = self._text(parsed, generation.token_ids, ended=generation.finish_reason == "stop")
        choice = {"index": 0, **self.body(text)}
        choice["logprobs"] = self.logprobs(generation) if parsed.logprobs else None
        return choice | self._exact(parsed, generation, first=first)

    def _exact(self, parsed: ParsedRequest, part: Generation, *, first: bool) -> dict[str, Any]:
        if not parsed.token_ids:
            return {}
        exact: dict[str, Any] = {"token_ids": list(part.token_ids), "token_versions": list(part.versions)}
        if first:
            exact["prompt_token_ids"] = list(parsed.generate.prompt_ids)
        return exact

    def _text(self, parsed: ParsedRequest, ids: Sequence[int], *, ended: bool) -> str:
        """Text of a response; the token that ended it is not part of it."""
        if self._codec is None:
            return ""
        said = ids[:-1] if ended else ids
        return self._codec.decode(said, skip_special=parsed.skip_special) if said else ""

    def _frame(self, parsed: ParsedRequest, kind: str) -> dict[str, Any]:
        return {"id": parsed.id, "object": kind, "created": parsed.created, "model": self._info.model}

    def _names(self, ids: Sequence[int]) -> list[str]:
        return [f"token_id:{number}" if self._codec is None else self._codec.token(number) for number in ids]

    @abstractmethod
    def prompt(self, body: dict[str, Any]) -> list[int]:
        """The prompt's ids."""

    @abstractmethod
    def wants_logprobs(self, body: dict[str, Any]) -> bool:
        """Whether logprobs were asked for."""

    @abstractmethod
    def body(self, text: str) -> dict[str, Any]:
        """How a choice carries the whole text."""

    @abstractmethod
    def piece(self, text: str, *, first: bool) -> dict[str, Any]:
        """How a streamed choice carries a piece of it."""

    @abstractmethod
    def logprobs(self, part: Generation) -> dict[str, Any]:
        """How a choice carries logprobs."""


class CompletionShape(Shape):
    """`/v1/completions`: a text or token ids as prompt."""

    kind = kind_of_piece = "text_completion"
    prefix = "cmpl"
    default_tokens = 16

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """See `Shape.prompt`."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (list, str)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            if self._codec is None:
                raise RequestError("this model's folder has no tokenizer; send token ids as prompt")
            return self._codec.encode(prompt)
        if not isinstance(prompt, list):
            raise RequestError("prompt must be a text or a list of token ids; several prompts are several requests")
        return _ids(prompt, "prompt")

    def wants_logprobs(self, body: dict[str, Any]) -> bool:
        """See `Shape.wants_logprobs`."""
        value = body.get("logprobs")
        if value is not None and (not isinstance(value, int) or value > 1):
            raise RequestError("logprobs are of the sampled tokens alone; ask for logprobs = 1")
        return value is not None and value is not False

    def body(self, text: str) -> dict[str, Any]:
        """See `Shape.body`."""
        return {"text": text}

    def piece(self, text: str, *, first: bool) -> dict[str, Any]:
        """See `Shape.piece`."""
        return {"text": text}

    def logprobs(self, part: Generation) -> dict[str, Any]:
        """See `Shape.logprobs`."""
        return {"tokens": self._names(part.token_ids), "token_logprobs": list(part.logprobs), "top_logprobs": None}


class ChatShape(Shape):
    """`/v1/chat/completions`: messages through the model's chat template."""

    kind, kind_of_piece = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"
    default_tokens = None

    def prompt(self, body: dict[str, Any]) -> list[int]:
        """See `Shape.prompt`."""
        if self._codec is None:
            raise RequestError("this model's folder has no tokenizer; use /v1/completions with token ids")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages must be a list of messages")
        try:
            read = [Message.from_openai(message).to_openai() for message in messages]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RequestError(f"messages can't be read: {error}") from None
        options = body.get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            raise RequestError("chat_template_kwargs must be an object")
        reserved = {"messages", "tools", "documents"} & options.keys()
        if reserved:
            raise RequestError(f"chat_template_kwargs can't set {', '.join(sorted(reserved))}")
        return self._codec.prompt(read, body.get("tools"), **options)

    def wants_logprobs(self, body: dict[str, Any]) -> bool:
        """See `Shape.wants_logprobs`."""
        if (body.get("top_logprobs") or 0) > 1:
            raise RequestError("logprobs are of the sampled tokens alone; leave top_logprobs out")
        return bool(body.get("logprobs"))

    def body(self, text: str) -> dict[str, Any]:
        """See `Shape.body`."""
        return {"message": {"role": "assistant", "content": text}}

    def piece(self, text: str, *, first: bool) -> dict[str, Any]:
        """See `Shape.piece`."""
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def logprobs(self, part: Generation) -> dict[str, Any]:
        """See `Shape.logprobs`."""
        pairs = zip(self._names(part.token_ids), part.logprobs, strict=True)
        return {
            "content": [{"token": name, "logprob": value, "bytes": None, "top_logprobs": []} for name, value in pairs]
        }


def _usage(parsed: ParsedRequest, completion: int) -> dict[str, int]:
    prompt = len(parsed.generate.prompt_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _number(body: dict[str, Any], name: str, default: float | None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {value!r}")
    return value


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RequestError(f"{name} must be a list of token ids")
    return value
