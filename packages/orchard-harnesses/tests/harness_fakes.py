"""Small stand-ins: a tokenizer trained on the spot, engines that say what they are told, a sandbox in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from orchard_api.errors import SandboxFileError
from orchard_api.messages import Message
from orchard_api.policy import (
    ChatReply,
    ChatRequest,
    FinishReason,
    GenerateRequest,
    Generation,
    PolicyInfo,
    SamplingParams,
)
from orchard_api.sandbox import ExecResult, FileInfo, TarReport
from orchard_harnesses.template import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
STRIPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }} Call: <tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "the cat sat on the mat and the file was there in the folder with the other files\n",
    "<shell>ls</shell> <shell>echo hello > out.txt</shell> <submit/> user assistant system\n",
    "hello hello hello world world list the files and write the answer to the file out.txt\n",
) * 4


def make_tokenizer(vocab: int = 340) -> Tokenizer:
    """A byte-level BPE with merges, so that one text has many splits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def make_model(folder: Path, template: str, *, eos: str = "<|im_end|>") -> Path:
    """Write a model folder without weights."""
    folder.mkdir(exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": eos}}))
    return folder


def split_into_bytes(template: ChatTemplate, text: str) -> list[int]:
    """One id per byte: a split that the tokenizer itself never makes of common text."""
    return [number for char in text for number in template.encode(char)]


Say = Sequence[int] | str | Exception | Generation


class ExactEngine:
    """An exact policy that gives prepared answers; text is split non-canonically, one id per character."""

    def __init__(
        self, folder: Path, template: ChatTemplate, says: Iterable[Say], *, context_length: int | None = None
    ) -> None:
        self._template = template
        self._says = iter(says)
        self.requests: list[GenerateRequest] = []
        self.sent: list[tuple[int, ...]] = []
        self.info = PolicyInfo(
            name="main",
            model="tiny",
            exact=True,
            model_path=folder,
            context_length=context_length,
            sampling=SamplingParams(max_tokens=64),
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        say = next(self._says)
        if isinstance(say, Exception):
            raise say
        if isinstance(say, Generation):
            return say
        ids = (*split_into_bytes(self._template, say), self._template.end_id) if isinstance(say, str) else tuple(say)
        reason: FinishReason = "stop" if ids[-1] in self._template.end_ids else "length"
        self.sent.append(ids)  # type: ignore[arg-type]
        number = len(self.sent)
        return Generation(
            token_ids=ids,  # type: ignore[arg-type]
            logprobs=tuple(-0.01 * n for n in range(len(ids))),
            versions=(number,) * len(ids),
            finish_reason=reason,
        )

    async def chat(self, request: ChatRequest) -> ChatReply:
        raise AssertionError("an exact policy is not asked for text")


class ChatEngine:
    """A policy that only speaks messages."""

    def __init__(self, says: Iterable[str | Message | Exception]) -> None:
        self._says = iter(says)
        self.requests: list[ChatRequest] = []
        self.info = PolicyInfo(name="main", model="api", exact=False)

    async def generate(self, request: GenerateRequest) -> Generation:
        raise AssertionError("a text policy is not asked for ids")

    async def chat(self, request: ChatRequest) -> ChatReply:
        self.requests.append(request)
        say = next(self._says)
        if isinstance(say, Exception):
            raise say
        message = Message(role="assistant", content=say) if isinstance(say, str) else say
        return ChatReply(message=message, finish_reason="stop", prompt_tokens=7, completion_tokens=3)


class MemorySandbox:
    """Files in a dict and commands answered by a function; enough for the loop."""

    sandbox_id = "memory"

    def __init__(self, run: Callable[[str], ExecResult | Exception] | None = None) -> None:
        self._run = run or (lambda command: ExecResult(exit_code=0, stdout=f"ran {command}\n".encode()))
        self.files: dict[str, bytes] = {}
        self.modes: dict[str, int] = {}
        self.commands: list[str] = []
        self.calls: list[dict[str, Any]] = []

    async def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        assert isinstance(command, str)
        self.commands.append(command)
        self.calls.append(options)
        result = self._run(command)
        if isinstance(result, Exception):
            raise result
        return result

    async def read_file(self, path: str, *, offset: int = 0, length: int | None = None, limit: int = 1 << 26) -> bytes:
        if path not in self.files:
            raise SandboxFileError(f"{path} does not exist", reason="not_found", path=path)
        return self.files[path]

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, **options: Any) -> int:
        self.files[path] = data
        if mode is not None:
            self.modes[path] = mode
        return len(data)

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        return FileInfo(name=path, kind="file", size=0, mode=self.modes.get(path, 0o100644), modified=0.0)

    async def make_dir(self, path: str, *, mode: int = 0o755, parents: bool = True) -> None:
        self.files.setdefault(path + "/", b"")

    async def put_tar(self, path: str, data: bytes) -> TarReport:
        self.files[path + "/tar"] = data
        return TarReport(delivered=1)


def policies(endpoint: Any) -> Mapping[str, Any]:
    """One endpoint as the run's `main`."""
    return {"main": endpoint}
