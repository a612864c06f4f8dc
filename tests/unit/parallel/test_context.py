"""What context parallelism refuses, and that nothing of it stays in a model's configuration; one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.models.common.base_model import FSDP2Mixin, refuse_own_sharding
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.family import TEXT_TRAITS, FamilyTraits, require_causal_attention
from mindspeed_mm.models.common.packed import documents_of_mask
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.parallel.context import ATTENTION, ContextParallel, check_attention
from mindspeed_mm.parallel.world import RankSet, World
from mindspeed_mm.utils.device import move_to_device
from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.support.host_reads import DEVICE, counted_host_reads

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}


def config(**fields: Any) -> Qwen3Config:
    return Qwen3Config(**{"num_attention_heads": 4, "num_key_value_heads": 2, **SIZES, **fields})


def alone() -> World:
    """The world of one process."""
    me: Any = RankSet(0, 1, None)  # type: ignore[arg-type]
    sets = dict.fromkeys(("batch", "context", "ring", "ulysses", "tensor", "gradients", "sums", "host"), me)
    return World(Dims(), 0, torch.device("cpu"), **sets)


def installed(model: Qwen3ForCausalLM) -> ContextParallel:
    context = ContextParallel(model.model, "Qwen3ForCausalLM", Dims())
    context.install(alone())
    return context


@pytest.mark.parametrize(
    ("dims", "fields", "message"),
    [
        (Dims(ulysses=8), {"num_attention_heads": 28}, "--context-parallel-size 8: M: 28 attention heads .* Ulysses"),
        (Dims(ring=2), {"attention_dropout": 0.1}, "2: M: config.json's attention_dropout: .* a ring doesn't compute"),
        (Dims(ring=2), {"attn_logit_softcapping": 50.0}, "M: config.json's attn_logit_softcapping: .* a ring doesn't"),
    ],
)
def test_attention_that_cannot_be_split(dims: Dims, fields: dict[str, Any], message: str) -> None:
    """The sentences are those of `configs/parallel_checks.py`."""
    with pytest.raises(ConfigError, match=message):
        check_attention(SimpleNamespace(**{"num_attention_heads": 4, **fields}), "M", dims)


def test_dropout_is_computed_by_the_models_own_function() -> None:
    check_attention(config(attention_dropout=0.1), "M", Dims(ulysses=4))


def test_a_family_states_that_its_attention_is_causal() -> None:
    assert require_causal_attention(TEXT_TRAITS, "M", 2) == "model"
    for traits in (FamilyTraits(language_model="model"), FamilyTraits(attention="causal")):
        with pytest.raises(ConfigError, match="--context-parallel-size 2: M has attention that isn't known to be caus"):
            require_causal_attention(traits, "M", 2)


def test_it_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """A dry run builds on meta, with the sizes alone."""
    config(num_attention_heads=3, num_key_value_heads=1, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    context = BuildContext(load_weights=False, defer_weights=True, dims=Dims(ulysses=2))
    with build_context(context), torch.device("meta"), pytest.raises(ConfigError, match="3 attention heads"):
        TransformersModel({"init_from_hf_path": str(tmp_path), "train_from_scratch": True})


class Own(nn.Module, FSDP2Mixin):
    pass


class OwnSharding(Own):
    def fully_shard(self, process_group: Any = None, fsdp2_config_path: Any = None) -> bool:
        return True


class OwnSplit(Own):
    def set_context_parallel(self) -> None:
        pass


def test_a_users_model_is_refused_unless_it_splits_tokens_itself() -> None:
    with build_context(BuildContext(dims=Dims(ulysses=2))):
        with pytest.raises(
            ConfigError, match="--context-parallel-size 2: nothing states how the tokens of Own are spl"
        ):
            Own().plan_sharding(2)
        assert OwnSplit().plan_sharding(2).dims.cp == 2
    refuse_own_sharding(Own(), Dims(ulysses=2))
    refuse_own_sharding(OwnSharding(), Dims())
    with pytest.raises(ConfigError, match="--context-parallel-size 2: OwnSharding has a fully_shard of its own"):
        refuse_own_sharding(OwnSharding(), Dims(ring=2))


def shard_of_row(context: ContextParallel, length: int) -> None:
    ones = torch.ones(1, length, dtype=torch.int64)
    context.for_batch(context.shard_of(ones), ones)


def test_a_layer_that_does_not_use_the_attention_function_is_found_at_the_first_batch() -> None:
    model = Qwen3ForCausalLM(config())
    context = installed(model)
    model.model.layers[1].self_attn = _NoAttention()
    shard_of_row(context, 5)
    with pytest.raises(
        ConfigError, match="1 of the 2 decoder layers of Qwen3ForCausalLM called the attention function"
    ):
        model(input_ids=torch.arange(5)[None], use_cache=False)


class _NoAttention(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


def test_a_model_without_shard_or_keyword_arguments_is_refused() -> None:
    model = Qwen3ForCausalLM(config())
    context = installed(model)
    with pytest.raises(DataError, match="came to Qwen3ForCausalLM without its shard; call prepare"):
        model(input_ids=torch.arange(5)[None])
    shard_of_row(context, 5)
    with pytest.raises(ConfigError, match="calls its language model with arguments by position"):
        model.model(torch.arange(5)[None])
    layer = model.model.layers[0].self_attn
    with pytest.raises(ConfigError, match="Qwen3Attention doesn't pass on the keyword arguments"):
        layer(torch.zeros(1, 5, 32), (torch.ones(1, 5, 8), torch.zeros(1, 5, 8)), None)


def test_attention_without_masks_is_refused() -> None:
    model = Qwen3ForCausalLM(config())
    model.config._attn_implementation = "of_a_kernel"
    with pytest.raises(ConfigError, match="has attention 'of_a_kernel', for which transformers makes no masks"):
        ContextParallel(model.model, "M", Dims(ulysses=2))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_one_rank_computes_what_the_model_computes(implementation: str) -> None:
    """Positions are made where there are none; the configuration that is written knows nothing of it."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config())
    ids = torch.randint(0, 64, (2, 7))
    expected = model(input_ids=ids, use_cache=False).logits
    model.config._attn_implementation = implementation
    context = installed(model)
    assert model.config._attn_implementation == ATTENTION
    assert ATTENTION not in model.config.to_json_string(use_diff=False)
    context.for_batch(context.shard_of(torch.ones_like(ids)), ids)
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-5)


def test_documents_of_a_mask() -> None:
    assert documents_of_mask(None, (2, 3)).tolist() == [[1, 1, 1]] * 2
    assert documents_of_mask(torch.tensor([[0, 1, 1], [1, 0, 0]]), (2, 3)).tolist() == [[0, 1, 1], [1, 0, 0]]
    with pytest.raises(DataError, match="row 2 of a micro-batch has zeros between its tokens"):
        documents_of_mask(torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]]), (2, 4))
    with pytest.raises(DataError, match=r"is \[1, 1, 3, 3\], expected \[1, 3\]"):
        documents_of_mask(torch.ones(1, 1, 3, 3), (1, 3))


def test_nothing_of_the_device_is_read_by_the_host() -> None:
    """In front of the layers; masks of packed rows are made under vmap, which lets nothing be read."""
    context = installed(Qwen3ForCausalLM(config()))
    documents = torch.tensor([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]])
    with counted_host_reads() as reads:
        batch = move_to_device({"ids": torch.zeros_like(documents), "shard": context.shard_of(documents)}, DEVICE)
        context.for_batch(batch["shard"], batch["ids"])
        reads.open()
        _, cut = context._before(context._language_model, (), {"input_ids": batch["ids"]})
        assert reads.windows == [[]]
        assert cut["position_ids"].tolist() == [list(range(7))] * 2
        assert len(reads.windows[0]) == 1


def test_flash_attention_gets_the_boundaries_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of documents, padding and what is filled up, over the flattened rows; and sees its own name."""
    seen: list[Any] = []

    def flash(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[Any, None]:
        boundaries = {name: kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q")}
        seen.append((module.config._attn_implementation, module.is_causal, mask, boundaries))
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", flash)
    model = Qwen3ForCausalLM(config())
    model.config._attn_implementation = "flash_attention_2"
    context = installed(model)
    for documents, expected in (([[1, 1, 2, 2, 2, 0], [1] * 6], [0, 2, 5, 6, 12]), ([[1] * 6, [1] * 6], None)):
        rows = torch.tensor(documents)
        context.for_batch(context.shard_of(rows), rows)
        model(input_ids=rows, use_cache=False)
        name, is_causal, mask, found = seen[-1]
        assert (name, is_causal, mask) == ("flash_attention_2", True, None)
        lengths = found["cu_seq_lens_q"]
        assert (None if lengths is None else lengths.tolist()) == expected
        assert found["cu_seq_lens_k"] is lengths and found["max_length_q"] == (6 if expected else None)
