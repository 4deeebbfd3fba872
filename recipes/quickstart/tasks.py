"""The clerk's desk: read the orders in a note, then carry them out with shell commands.

A desk is the sandbox's working directory: a note with two orders, the files that they speak of, and one more. The
instruction only names the note, so the agent has to look before it can act. There are more than 10^8 desks, told apart
by note and orders; one in five is held out, by a hash of exactly these.
"""

from __future__ import annotations

import itertools
import random
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from pydantic import Field

from orchard_api.errors import TaskError
from orchard_api.registry import PluginConfig
from orchard_api.task import Check, Solution, SolutionStep, Task

NAMES = (
    *("acorn", "amber", "anchor", "apple", "basil", "beacon", "birch", "breeze"),
    *("cabin", "candle", "canyon", "cedar", "clover", "cobalt", "copper", "coral"),
    *("daisy", "delta", "ember", "falcon", "fern", "flint", "garnet", "ginger"),
    *("harbor", "hazel", "heron", "indigo", "island", "ivory", "jasper", "juniper"),
)
"""What files are called, and the words in them."""

WORDING = {
    "copy": ("copy {a} to {b}", "cp {a} {b}"),
    "rename": ("rename {a} to {b}", "mv {a} {b}"),
    "write": ("write {a} in {b}", "echo {a} > {b}"),
    "append": ("append {a} to {b}", "echo {a} >> {b}"),
}
"""Each verb's order, and the command that carries it out."""

MIXED_UP = {"copy": "rename", "rename": "copy", "write": "append", "append": "write"}
ORDERS = 2
HELD_OUT_OF_256 = 52


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One line of a note."""

    verb: str
    a: str
    b: str

    @property
    def text(self) -> str:
        """How the note says it."""
        return WORDING[self.verb][0].format(a=self.a, b=self.b)

    @property
    def command(self) -> str:
        """How a shell does it."""
        return WORDING[self.verb][1].format(a=self.a, b=self.b)

    def mixed_up(self) -> Order:
        """What a careless clerk takes it for: copying for moving, overwriting for appending, and back."""
        return Order(verb=MIXED_UP[self.verb], a=self.a, b=self.b)

    def carry_out(self, files: dict[str, str]) -> None:
        """Do to file contents what the command does to files."""
        if self.verb == "copy":
            files[self.b] = files[self.a]
        elif self.verb == "rename":
            files[self.b] = files.pop(self.a)
        else:
            files[self.b] = (files[self.b] if self.verb == "append" else "") + f"{self.a}\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """One desk: the note's name, its orders, and all files by name, the note included."""

    note: str
    orders: tuple[Order, ...]
    files: Mapping[str, str]

    @property
    def held_out(self) -> bool:
        """Whether it is kept from training; depends on note and orders alone."""
        key = "; ".join((self.note, *(order.text for order in self.orders)))
        return blake2b(key.encode(), digest_size=1).digest()[0] < HELD_OUT_OF_256

    def after(self) -> dict[str, str]:
        """The files when the orders have been carried out."""
        files = dict(self.files)
        for order in self.orders:
            order.carry_out(files)
        return files


def lay_out(rng: random.Random) -> Desk:
    """Draw a desk; all names on it differ."""
    names = iter(rng.sample(NAMES, 2 * ORDERS + 2))
    note, spare = next(names), next(names)
    files = {spare: _line(rng)}
    orders = []
    for _ in range(ORDERS):
        order = Order(verb=rng.choice(tuple(WORDING)), a=next(names), b=next(names))
        files[order.a if order.verb in ("copy", "rename") else order.b] = _line(rng, other_than=order.a)
        orders.append(order)
    files[note] = "".join(f"{order.text}\n" for order in orders)
    return Desk(note=note, orders=tuple(orders), files=files)


def _line(rng: random.Random, *, other_than: str = "") -> str:
    """A line of content; what is to be written must not be there already."""
    return f"{rng.choice([name for name in NAMES if name != other_than])}\n"


class DeskConfig(PluginConfig):
    """Options of the desk."""

    carelessness: float = Field(
        default=0.36, ge=0, le=1, description="how often the clerk of the split `clerk` mixes up an order"
    )


class DeskTaskset:
    """Endless splits: `train`, `heldout`, and `clerk`, tasks for training as a careless clerk was seen to do them.

    The solutions of `train` and `heldout` are right; the clerk's are only as good as the clerk.
    """

    Config = DeskConfig

    def __init__(self, config: DeskConfig) -> None:
        self._config = config

    def tasks(self, split: str, *, seed: int) -> Iterator[Task]:
        """See `orchard_api.Taskset`."""
        if split not in ("train", "heldout", "clerk"):
            raise TaskError(f"unknown split {split!r}; the desk has: train, heldout, clerk")
        carelessness = self._config.carelessness if split == "clerk" else 0.0
        return _tasks(split, seed, carelessness)


def _tasks(split: str, seed: int, carelessness: float) -> Iterator[Task]:
    rng = random.Random(f"{split} {seed}")
    for number in itertools.count():
        desk = lay_out(rng)
        while desk.held_out != (split == "heldout"):
            desk = lay_out(rng)
        done = [order.mixed_up() if rng.random() < carelessness else order for order in desk.orders]
        yield to_task(desk, done, task_id=f"{split}-{seed}-{number}")


def to_task(desk: Desk, done: list[Order], *, task_id: str) -> Task:
    """A desk as a task whose solution carries out `done`.

    The check compares the names and the lines of all files with what the orders demand.
    """
    after = desk.after()
    lines = sorted(f"./{name}:{line}" for name, text in after.items() for line in text.splitlines())
    expected = shlex.quote("\n".join((*sorted(after), *lines)))
    look = SolutionStep(commands=(f"cat {desk.note}",))
    act = SolutionStep(commands=("\n".join(order.command for order in done),))
    return Task(
        task_id=task_id,
        instruction=f"Carry out the orders in the note {desk.note}",
        files={name: text.encode() for name, text in desk.files.items()},
        check=Check(command=f'cd "$WORKDIR" && test "$(ls -A; grep -r "" . | sort)" = {expected}', timeout_s=30.0),
        solution=Solution(steps=(look, act)),
        agent_timeout_s=60.0,
        metadata={"orders": [order.text for order in desk.orders]},
    )
