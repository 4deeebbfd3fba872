"""Tiny models, rows and stores that the tests share."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from orchard_api.policy import GenerateRequest, ModelSource, PolicyServerContext, SamplingParams
from orchard_api.training import Row, TrainerContext
from orchard_trainer_deepspeed.config import InProcessConfig, MemoryStoreConfig, TorchTrainerConfig
from orchard_trainer_deepspeed.learner import TorchTrainer
from orchard_trainer_deepspeed.server import InProcessServer
from orchard_trainer_deepspeed.weights import MemoryWeightStore

BASE = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]


def write_model(folder: Path, *, tokenizer: bool = False, **changes) -> Path:
    """A model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    if tokenizer:
        words = WORDS + [f"w{number}" for number in range(BASE["vocab_size"] - len(WORDS))]
        made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.add_special_tokens(WORDS)
        made.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def random_source(folder: Path, seed: int = 0) -> ModelSource:
    return ModelSource(path=folder, init="random", seed=seed)


def sft_row(ids, mask, name="e") -> Row:
    """Cross entropy where the mask is set."""
    zeros = [0.0] * len(ids)
    return Row(
        ids=ids,
        mask=[bool(flag) for flag in mask],
        rl=zeros,
        ce=[float(flag) for flag in mask],
        ref_kl=zeros,
        logprobs=zeros,
        versions=[-1] * len(ids),
        episode_id=name,
    )


def rl_row(ids, mask, advantage, logprobs, *, name="e", group="g", version=0, ref_kl=0.0) -> Row:
    """A policy gradient where the mask is set."""
    flags = [bool(flag) for flag in mask]
    return Row(
        ids=ids,
        mask=flags,
        rl=[advantage if flag else 0.0 for flag in flags],
        ce=[0.0] * len(ids),
        ref_kl=[ref_kl if flag else 0.0 for flag in flags],
        logprobs=logprobs,
        versions=[version if flag else -1 for flag in flags],
        episode_id=name,
        group_id=group,
    )


def generation_row(prompt, generation, advantage, *, name, group) -> Row:
    """What was sampled, as a row."""
    count = len(generation.token_ids)
    return Row(
        ids=[*prompt, *generation.token_ids],
        mask=[False] * len(prompt) + [True] * count,
        rl=[0.0] * len(prompt) + [advantage] * count,
        ce=[0.0] * (len(prompt) + count),
        ref_kl=[0.0] * (len(prompt) + count),
        logprobs=[0.0] * len(prompt) + list(generation.logprobs),
        versions=[-1] * len(prompt) + list(generation.versions),
        episode_id=name,
        group_id=group,
    )


def request(prompt, *, deadline_s=30.0, **sampling) -> GenerateRequest:
    return GenerateRequest(prompt_ids=prompt, sampling=SamplingParams(**sampling), deadline_s=deadline_s)


def memory_store(keep: int = 1) -> MemoryWeightStore:
    return MemoryWeightStore(MemoryStoreConfig(keep=keep))


@asynccontextmanager
async def trainer(folder: Path, *, store=None, seed=0, asynchronous=False, init="random", **options):
    """A started learner."""
    made = TorchTrainer(TorchTrainerConfig(**options))
    source = ModelSource(path=folder, init=init, seed=seed)
    context = TrainerContext(
        model=source, store=store or memory_store(), run_dir=folder, seed=seed, asynchronous=asynchronous
    )
    await made.start(context)
    try:
        yield made
    finally:
        await made.aclose()


@asynccontextmanager
async def server(folder: Path, *, store=None, seed=0, init="random", **options):
    """A started policy server."""
    made = InProcessServer(InProcessConfig(**options))
    source = ModelSource(path=folder, init=init, seed=seed)
    await made.start(PolicyServerContext(name="main", model=source, store=store))
    try:
        yield made
    finally:
        await made.aclose()


@asynccontextmanager
async def held(endpoint):
    """The engine does nothing until the block ends or sets the event that it is given."""
    gate = threading.Event()
    blocked = asyncio.create_task(endpoint._thread.call(gate.wait))
    await asyncio.sleep(0)
    try:
        yield gate
    finally:
        gate.set()
        await blocked
