"""Continuous batching: every step gives each running request one token, and new requests join between steps.

Not safe for threads: `server` owns an engine in one thread.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchard_api.policy import FinishReason, Generation, PolicyVersion, SamplingParams
from orchard_trainer_deepspeed.checkpoint import load_weights
from orchard_trainer_deepspeed.kv_cache import KVCache
from orchard_trainer_deepspeed.model import Decoder
from orchard_trainer_deepspeed.prefix_cache import PrefixCache
from orchard_trainer_deepspeed.sampling import sample


@dataclass(kw_only=True, slots=True, eq=False)
class ActiveRequest:
    """One request under way.

    Attributes:
        prompt: its tokens.
        sampling: how to sample; never changed.
        limit: most tokens of the response, the context's room considered.
        stops: ids that end it.
        ids, logprobs, versions: the response so far.
        cached: tokens of prompt and response whose keys and values are in its slot.
        finish: why it ended, or None.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    limit: int
    stops: frozenset[int]
    random: random.Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    cached: int = 0
    finish: FinishReason | None = None
    cancelled: bool = False

    def generation(self) -> Generation:
        """What was sampled."""
        return Generation(
            token_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=self.finish or "abort",
        )


class Engine:
    """The model, its running requests, and those that wait.

    Args:
        model: its weights are changed by `swap` alone.
        version: the policy version of the weights.
        max_batch: requests that run at once.
        prefill_tokens: padded prompt tokens computed at once; a longer prompt is alone.
        prefix_cache_bytes: memory for earlier prompts and responses.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        version: PolicyVersion = 0,
        max_batch: int = 64,
        prefill_tokens: int = 4096,
        prefix_cache_bytes: int = 64 << 20,
    ) -> None:
        self.model = model
        self.version = version
        self.running: list[ActiveRequest] = []
        self.waiting: deque[ActiveRequest] = deque()
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._cache = KVCache(model.shape, max_batch, model.device)
        self._prefixes = PrefixCache(prefix_cache_bytes)

    def add(self, request: ActiveRequest) -> None:
        """Queue a request; it starts in the order of arrival."""
        self.waiting.append(request)

    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    @torch.inference_mode()
    def step(self) -> list[ActiveRequest]:
        """Admit what fits and give one token to each running request.

        Returns:
            The requests that got a token; those with a `finish` are done and their slots free.
        """
        self._drop_cancelled()
        touched: list[ActiveRequest] = []
        before = len(self.running)
        if self.waiting and before < self._max_batch:
            touched += self._admit()
        if before:
            touched += self._decode(before)
        self._release()
        return touched

    @torch.inference_mode()
    def swap(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        """Take other weights. Responses under way go on: keys and values are computed again for all their tokens.

        So a token sampled after the swap has the probability that the new weights give it after that whole sequence,
        which is what the learner computes.

        Raises:
            WeightsError: the weights don't fit; the old ones stay.
        """
        load_weights(self.model, weights)
        self.version = version
        self._prefixes.clear()
        self._drop_cancelled()
        for request in self.running:
            request.cached = 0

    def _admit(self) -> list[ActiveRequest]:
        """Start waiting requests: shared prefixes from the cache, the rest computed, the first token sampled.

        Of requests with the same prompt (a group) one is computed; the others copy its keys and values.
        """
        admitted: list[ActiveRequest] = []
        while self.waiting and len(self.running) + len(admitted) < self._max_batch:
            request = self.waiting.popleft()
            if not request.cancelled:
                admitted.append(request)
        groups: dict[tuple[int, ...], list[ActiveRequest]] = {}
        for request in admitted:
            groups.setdefault(request.prompt, []).append(request)
        found = {prompt: self._prefixes.find(prompt) for prompt in groups}

        def new_tokens(prompt: tuple[int, ...]) -> int:
            hit = found[prompt]
            return len(prompt) - (0 if hit is None else hit[0])

        leaders = sorted(groups, key=new_tokens)
        first = len(self.running)
        for prompt in leaders:
            hit = found[prompt]
            self.running.append(groups[prompt][0])
            if hit is not None:
                self._cache.restore(len(self.running) - 1, hit[1], hit[0])
                self.running[-1].cached = hit[0]
        states = self._compute(range(first, len(self.running)))
        for slot, prompt in enumerate(leaders, first):
            if not self._prefixes.holds(prompt):
                self._prefixes.put(prompt, self._cache.save(slot, len(prompt)))
            for request in groups[prompt][1:]:
                self.running.append(request)
                request.cached = len(prompt)
                self._cache.move(slot, len(self.running) - 1, len(prompt))
                states.append(states[slot - first])
        if admitted:
            self._sample(self.running[first:], torch.stack(states))
        return admitted

    def _decode(self, count: int) -> list[ActiveRequest]:
        """One token for the first `count` running requests."""
        requests = self.running[:count]
        if any(request.cached == 0 for request in requests):
            self._sample(requests, torch.stack(self._compute(range(count))))
            return requests
        device = self.model.device
        ids = torch.tensor([[request.ids[-1]] for request in requests], device=device)
        starts = torch.tensor([request.cached for request in requests], device=device)
        longest = max(request.cached for request in requests) + 1
        hidden = self.model.extend(ids, starts, None, self._cache.view(0, count, longest))
        for request in requests:
            request.cached += 1
        self._sample(requests, hidden)
        return requests

    def _compute(self, slots: Sequence[int]) -> list[Tensor]:
        """Keys and values of the tokens that neighbouring slots lack; each slot's last hidden state, [d]."""
        states: list[Tensor] = []
        for group in self._groups(slots):
            requests = [self.running[slot] for slot in group]
            tokens = [(*request.prompt, *request.ids)[request.cached :] for request in requests]
            count = max(map(len, tokens))
            ids = torch.tensor([[*row, *([0] * (count - len(row)))] for row in tokens], device=self.model.device)
            starts = torch.tensor([request.cached for request in requests], device=self.model.device)
            last = torch.tensor([len(row) - 1 for row in tokens], device=self.model.device)
            longest = max(request.cached for request in requests) + count
            view = self._cache.view(group[0], group[-1] + 1, longest)
            states += self.model.extend(ids, starts, last, view)
            for request, row in zip(requests, tokens, strict=True):
                request.cached += len(row)
        return states

    def _groups(self, slots: Sequence[int]) -> list[list[int]]:
        """Runs of slots of similar length whose padded new tokens stay within the bound."""
        groups: list[list[int]] = []
        least = most = 0
        for slot in slots:
            request = self.running[slot]
            new = len(request.prompt) + len(request.ids) - request.cached
            low, high = min(least, new), max(most, new)
            if groups and high <= 2 * low + 16 and high * (len(groups[-1]) + 1) <= self._prefill_tokens:
                groups[-1].append(slot)
                least, most = low, high
            else:
                groups.append([slot])
                least = most = new
        return groups

    def _sample(self, requests: Sequence[ActiveRequest], hidden: Tensor) -> None:
        ids, logprobs = sample(
            self.model.logits(hidden),
            temperatures=[request.sampling.temperature for request in requests],
            top_ps=[request.sampling.top_p for request in requests],
            uniforms=[request.random.random() for request in requests],
        )
        for request, token, logprob in zip(requests, ids, logprobs, strict=True):
            request.ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            if token in request.stops:
                request.finish = "stop"
            elif len(request.ids) >= request.limit:
                request.finish = "length"

    def _drop_cancelled(self) -> None:
        for request in self.running:
            if request.cancelled:
                request.finish = "abort"
        self._release()

    def _release(self) -> None:
        """Free the slots of what is done: the last running sequence moves into the gap."""
        for slot in range(len(self.running) - 1, -1, -1):
            request = self.running[slot]
            if request.finish is None:
                continue
            if request.finish != "abort" and request.cached:
                known = (*request.prompt, *request.ids)[: request.cached]
                if not self._prefixes.holds(known):
                    self._prefixes.put(known, self._cache.save(slot, request.cached))
            last = self.running.pop()
            if last is not request:
                self.running[slot] = last
                self._cache.move(len(self.running), slot, last.cached)
