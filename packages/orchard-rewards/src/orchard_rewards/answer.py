"""What an agent answered: its final answer, or a file that it left."""

from __future__ import annotations

from dataclasses import dataclass

from orchard_api.episode import Episode
from orchard_api.errors import GraderError, SandboxFileError


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A text, or why there is none."""

    text: str | None
    problem: str = ""


async def read_answer(episode: Episode, file: str | None, *, limit: int) -> Answer:
    """The answer, or the text of `file` inside; what is longer than `limit` bytes or no text is no answer.

    Raises:
        GraderError: there is no live sandbox to read the file from.
    """
    if file is None:
        if len(episode.answer.encode("utf-8", "surrogatepass")) > limit:
            return Answer(text=None, problem="too large")
        return Answer(text=episode.answer)
    if episode.sandbox is None:
        raise GraderError("the episode has no live sandbox to read the answer from")
    try:
        data = await episode.sandbox.read_file(file, limit=limit)
    except SandboxFileError as error:
        return Answer(text=None, problem=error.reason.replace("_", " "))
    try:
        return Answer(text=data.decode("utf-8"))
    except UnicodeDecodeError:
        return Answer(text=None, problem="not UTF-8 text")
