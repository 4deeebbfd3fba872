"""The decoder: its cache against its training pass, its weights against Hugging Face's names, packing, logprobs."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_models import BASE, random_source, write_model

from orchard_api.errors import ConfigError
from orchard_api.policy import ModelSource
from orchard_trainer_deepspeed.architecture import parse_architecture
from orchard_trainer_deepspeed.checkpoint import (
    EMBEDDING,
    HEAD,
    WeightsError,
    build_model,
    export_weights,
    load_weights,
    named_weights,
    save_model,
)
from orchard_trainer_deepspeed.config import TorchTrainerConfig
from orchard_trainer_deepspeed.kv_cache import KVCache
from orchard_trainer_deepspeed.logprobs import token_logprobs
from orchard_trainer_deepspeed.model import Layout
from orchard_trainer_deepspeed.schedule import learning_rate, micro_batches, minibatches

VARIANTS = {
    "llama-gqa-tied": {},
    "llama-untied": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "llama-biases": {"attention_bias": True, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 1},
}


def make(folder, **changes):
    """A model whose biases aren't all zero."""
    model = build_model(random_source(write_model(folder, **changes)))
    for name, view in named_weights(model).items():
        if name.endswith(".bias"):
            view.normal_()
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_rows_equal_rows_one_by_one(tmp_path, variant):
    # AReaL#1442: attention over a pack that ignores where rows end.
    model = make(tmp_path, **VARIANTS[variant])
    rows = [torch.randint(0, 40, (length,)) for length in (9, 30, 1, 17)]
    packed = model.hidden(torch.cat(rows), Layout.of([9, 30, 1, 17]))
    alone = torch.cat([model.hidden(row, Layout.of([len(row)])) for row in rows])
    assert torch.allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_gives_what_the_training_pass_gives(tmp_path, variant):
    model = make(tmp_path, **VARIANTS[variant])
    lengths, split = [20, 33, 12], [5, 21, 11]
    rows = [torch.randint(0, 40, (length,)) for length in lengths]
    full = torch.split(model.hidden(torch.cat(rows), Layout.of(lengths)), lengths)
    with torch.inference_mode():
        cache = KVCache(model.shape, 3, model.device)
        padded = torch.zeros(3, 21, dtype=torch.int64)
        for place, (row, size) in enumerate(zip(rows, split, strict=True)):
            padded[place, :size] = row[:size]
        last = torch.tensor(split) - 1
        states = model.extend(padded, torch.zeros(3, dtype=torch.int64), last, cache.view(0, 3, 21))
        for place, size in enumerate(split):
            assert torch.allclose(states[place], full[place][size - 1], atol=1e-5)
        for step in range(6):
            ids = torch.stack([row[min(size + step, len(row) - 1)] for row, size in zip(rows, split, strict=True)])
            starts = torch.tensor(split) + step
            states = model.extend(ids[:, None], starts, None, cache.view(0, 3, int(starts.max()) + 1))
            for place, size in enumerate(split):
                if size + step < lengths[place]:
                    assert torch.allclose(states[place], full[place][size + step], atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_computes_the_same_from_the_saved_folder(tmp_path, variant, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    model = make(tmp_path / "source", **VARIANTS[variant])
    save_model(model, tmp_path / "saved", source=tmp_path / "source")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    ids = torch.randint(0, 40, (1, 50))
    with torch.no_grad():
        expected = theirs(ids).logits[0]
        got = model.logits(model.hidden(ids[0], Layout.of([50])))
    assert torch.allclose(got, expected, atol=1e-4)
    assert sum(weight.numel() for weight in theirs.parameters()) == model.shape.parameters
    assert theirs.state_dict().keys() - {HEAD} == named_weights(model).keys() - {HEAD}


def test_a_saved_folder_is_loaded_again(tmp_path):
    model = make(tmp_path / "a", model_type="qwen2")
    save_model(model, tmp_path / "b", source=tmp_path / "a")
    again = build_model(ModelSource(path=tmp_path / "b"))
    for name, value in export_weights(model).items():
        assert torch.equal(value, export_weights(again)[name])
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"config.json", "model.safetensors"}


def test_random_weights_come_from_the_seed(tmp_path):
    folder = write_model(tmp_path)
    one, same, other = (export_weights(build_model(random_source(folder, seed))) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one[EMBEDDING], other[EMBEDDING])
    assert one[EMBEDDING].std() == pytest.approx(BASE["initializer_range"], rel=0.1)


def test_a_tied_output_is_exported_once_and_follows_the_embedding(tmp_path):
    # vllm#51665: the embedding was updated, the output matrix was not.
    model = make(tmp_path)
    weights = export_weights(model)
    assert HEAD not in weights
    weights[EMBEDDING] = weights[EMBEDDING] + 1
    load_weights(model, {**weights, HEAD: weights[EMBEDDING]})
    assert torch.equal(model.output_matrix, weights[EMBEDDING])
    with pytest.raises(WeightsError, match="ties"):
        load_weights(model, {**weights, HEAD: weights[EMBEDDING] + 1})


@pytest.mark.parametrize("spoil", ["missing", "unknown", "empty", "shape"])
def test_weights_that_do_not_fit_change_nothing(tmp_path, spoil):
    # R1-V#132: tensors of shape [0] were loaded.
    model = make(tmp_path)
    before = export_weights(model)
    weights = {name: value + 1 for name, value in before.items()}
    name = "model.layers.1.mlp.down_proj.weight"
    if spoil == "missing":
        del weights[name]
    elif spoil == "unknown":
        weights["model.layers.7.mlp.down_proj.weight"] = torch.zeros(1)
    else:
        weights[name] = torch.zeros(0) if spoil == "empty" else weights[name].T.contiguous()
    with pytest.raises(WeightsError, match=r"layers\.[17]\.mlp\.down_proj"):
        load_weights(model, weights)
    after = export_weights(model)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"hidden_size": "wide"}, "can't be read"),
        ({"hidden_size": None}, "can't be read"),
    ],
)
def test_a_config_that_is_not_ours_is_refused(changes, word):
    with pytest.raises(ConfigError, match=word):
        parse_architecture({**BASE, **changes})


def test_a_missing_folder_or_file_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        build_model(ModelSource(path=tmp_path))
    write_model(tmp_path)
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        build_model(ModelSource(path=tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ConfigError, match="can't be read"):
        build_model(ModelSource(path=tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        build_model(ModelSource(path=tmp_path))


def test_sharded_weights_are_read(tmp_path):
    from safetensors.torch import save_file

    model = make(tmp_path)
    names = list(export_weights(model))
    shards = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for shard, some in shards.items():
        save_file({name: export_weights(model)[name] for name in some}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, some in shards.items() for name in some}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    again = build_model(ModelSource(path=tmp_path))
    assert torch.equal(again.embedding, model.embedding)


@pytest.mark.parametrize("chunk", [11, 33, 10_000])
def test_chunked_logprobs_and_their_gradient_are_exact(chunk):
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (7,))
    got, entropy = token_logprobs(hidden, matrix, targets, temperature=0.6, chunk=chunk)
    whole = torch.log_softmax(hidden @ matrix.T / 0.6, -1)
    assert torch.allclose(got, whole.gather(1, targets[:, None])[:, 0], atol=1e-12)
    assert torch.allclose(entropy, -(whole.exp() * whole).sum(-1), atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda a, b: token_logprobs(a, b, targets, temperature=0.6, chunk=chunk)[0], (hidden, matrix)
    )


def test_logits_are_never_all_alive():
    # OpenRLHF#718: [T, V] in float32 kept for the backward pass.
    rows, vocabulary, chunk = 64, 1000, 8000
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(value, torch.Tensor):
                    largest = max(largest, value.numel())
            return result

    hidden = torch.randn(rows, 4, requires_grad=True)
    matrix = torch.randn(vocabulary, 4, requires_grad=True)
    with Watch():
        logprobs, _ = token_logprobs(hidden, matrix, torch.zeros(rows, dtype=torch.int64), temperature=1.0, chunk=chunk)
        logprobs.sum().backward()
    assert matrix.grad.abs().sum() > 0
    assert largest <= chunk


@given(st.lists(st.integers(2, 300), min_size=1, max_size=60), st.integers(1, 500))
def test_micro_batches_hold_each_row_once_within_the_budget(lengths, budget):
    groups = micro_batches(lengths, budget)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or sum(lengths[row] for row in group) <= budget for group in groups)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 8))
def test_minibatches_deal_everything_evenly(used, unused, count):
    parts = minibatches(range(used), range(100, 100 + unused), count)
    assert sorted(item for some, others in parts for item in (*some, *others)) == [
        *range(used),
        *range(100, 100 + unused),
    ]
    sizes = [len(some) for some, _ in parts]
    assert max(sizes) - min(sizes) <= 1
    assert used == 0 or min(sizes) > 0


def test_the_learning_rate_rises_and_falls():
    def rates(**options):
        config = TorchTrainerConfig(lr=1.0, warmup_updates=2, **options)
        return [learning_rate(config, done=done, step=1.0, updates=6) for done in range(8)]

    assert rates() == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1])
    assert rates(schedule="linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert rates(schedule="linear", min_lr_ratio=0.5)[-1] == pytest.approx(0.5)
    cosine = rates(schedule="cosine")
    assert cosine[4] == pytest.approx(0.5)
    assert cosine[-1] == pytest.approx(0)
    halves = [
        learning_rate(TorchTrainerConfig(lr=1.0, warmup_updates=1), done=d, step=0.5, updates=4) for d in (0, 0.5)
    ]
    assert halves == pytest.approx([0.5, 1.0])
