"""A family from a module of the user's own trains on both backends, without an edit anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny_text import text_dir
from tests.support.workers import RankPool

PLUGIN = """
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from mindspeed_mm.configs.family_structure import FamilyStructure
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.models.common.families import TEXT, Family
from mindspeed_mm.models.megatron.family import MegatronFamily
from mindspeed_mm.models.common.modelzoo import ModelHub


class ToyConfig(Qwen3Config):
    model_type = "toy_lm"


class ToyForCausalLM(Qwen3ForCausalLM):
    config_class = ToyConfig


class ToyAdapter(DefaultAdapter):
    pass


def names_of(name, shape, decoder, head):
    from mindspeed_mm.models.megatron.text_decoder.names import decoder_tensor

    ASKED.add(name)
    return decoder_tensor(name, shape, decoder, head)


ASKED = set()
AutoConfig.register("toy_lm", ToyConfig)
MEGATRON = MegatronFamily(FamilyStructure(qk_norm=True), tensor_names=names_of)
ModelHub.register("toy_lm", Family(ToyForCausalLM, traits=TEXT, adapter=ToyAdapter(), megatron=MEGATRON))
"""
LEARNING_RATE = 0.5


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A folder with the module `toy_family`, and a directory with weights of its model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy_family.py").write_text(PLUGIN)
    hf_dir = text_dir(folder / "hf", Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": False})
    config = (hf_dir / "config.json").read_text()
    (hf_dir / "config.json").write_text(
        config.replace('"model_type": "qwen3"', '"model_type": "toy_lm"').replace("Qwen3For", "ToyFor")
    )
    return str(folder), str(hf_dir)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def train(model: Any, learning_rate: float) -> list[float]:
    """Mean losses before and after one step of plain descent."""
    optimizer, losses = torch.optim.SGD(model.parameters(), learning_rate), []
    for _ in range(2):
        output = model(**model.prepare(batch()))
        loss = output["loss"] / output["denominator"]
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def on_fsdp2(folder: str, hf_dir: str) -> tuple[list[float], str, str, str]:
    """Losses; the names of the class, the adapter and the trained language model's path."""
    sys.path.insert(0, folder)
    from mindspeed_mm.models.transformers.adapters import find_adapter
    from mindspeed_mm.models.transformers_model import TransformersModel

    description: dict[str, Any] = {"init_from_hf_path": hf_dir, "plugin": "toy_family"}
    adapter = type(find_adapter(SimpleNamespace(**description))).__name__
    model = TransformersModel(description)
    name = type(model.model).__name__
    model.fully_shard()
    # two ranks have the same rows, and their gradients are summed
    return train(model, LEARNING_RATE / 2), name, adapter, str(model.traits.language_model)


def on_megatron(folder: str, hf_dir: str) -> tuple[list[float], list[str]]:
    """Losses, and which tensors the family was asked about."""
    sys.path.insert(0, folder)
    from tests.support.megatron import start

    start()
    from mindspeed_mm.backends.ptd import materialize_chunk, world_of_megatron
    from mindspeed_mm.checkpoint.megatron.state import MegatronState
    from mindspeed_mm.models.common.build_context import BuildContext, build_context
    from mindspeed_mm.models.megatron.vlm_model import VLModel
    from mindspeed_mm.parallel.sizes import ParallelSizes
    from mindspeed_mm.parallel.world import start_world

    with build_context(BuildContext(sizes=ParallelSizes())):
        model = VLModel.from_config({"init_from_hf_path": hf_dir, "plugin": ["toy_family"]})
    materialize_chunk(model, torch.device("cpu"))
    stored = MegatronState([model], model.meta_model(), world_of_megatron(start_world("gloo")))
    stored.load_weights(Path(hf_dir), strict=True, downcast=False, allow_pickle=False)
    losses = train(model, LEARNING_RATE)
    return losses, sorted(name.rsplit(".", 2)[-2] for name in sys.modules["toy_family"].ASKED if ".1." in name)


def test_a_family_of_ones_own_trains_on_both_backends(
    toy: tuple[str, str], ranks2: RankPool, megatron_pools: dict[int, RankPool]
) -> None:
    """Its class, its adapter and its traits on FSDP2; its norms and its names on Megatron; the same two losses."""
    losses, name, adapter, language_model = ranks2.run(on_fsdp2, *toy)[0]
    assert (name, adapter, language_model) == ("ToyForCausalLM", "ToyAdapter", "model")
    ((others, asked),) = megatron_pools[1].run(on_megatron, *toy)
    assert losses[1] < losses[0]
    assert others == pytest.approx(losses, rel=1e-5)
    assert {"q_layernorm", "k_layernorm", "linear_qkv"} <= set(asked)
