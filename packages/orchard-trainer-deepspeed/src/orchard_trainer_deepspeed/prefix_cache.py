"""Keys and values of prompts and finished responses, for the next turn of the same episode and for its group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from orchard_trainer_deepspeed.kv_cache import Saved


class PrefixCache:
    """Least recently used entries within a bound of bytes. Emptied at every swap: keys and values belong to weights.

    Args:
        limit: bytes that the entries may take together; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[tuple[int, ...], Saved] = OrderedDict()
        self._lengths: dict[int, int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, ids: tuple[int, ...]) -> bool:
        """Whether exactly these tokens are there."""
        return ids in self._entries

    def put(self, ids: tuple[int, ...], saved: Saved) -> None:
        """Keep the keys and values of these tokens."""
        size = saved.numel() * saved.element_size()
        if size > self._limit or ids in self._entries:
            return
        self._entries[ids] = saved
        self._lengths[len(ids)] = self._lengths.get(len(ids), 0) + 1
        self._bytes += size
        while self._bytes > self._limit:
            oldest, dropped = self._entries.popitem(last=False)
            self._bytes -= dropped.numel() * dropped.element_size()
            self._lengths[len(oldest)] -= 1
            if not self._lengths[len(oldest)]:
                del self._lengths[len(oldest)]

    def find(self, ids: Sequence[int]) -> tuple[int, Saved] | None:
        """The longest entry that these tokens begin with, and how much of it is of use.

        The last token is never taken from here: its hidden state is what predicts the next one.
        """
        whole = tuple(ids)
        for length in sorted(self._lengths, reverse=True):
            if length <= len(whole):
                saved = self._entries.get(whole[:length])
                if saved is not None:
                    self._entries.move_to_end(whole[:length])
                    return min(length, len(whole) - 1), saved
        return None

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._lengths.clear()
        self._bytes = 0
