"""VLModel: published sizes on meta, what is recomputed, and what is refused, in a sentence."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launch import ROOT
from tests.support.megatron import start
from tests.support.workers import RankPool

EXAMPLES = ROOT / "examples" / "qwen2.5vl"
# parameters of the published checkpoints, as their index files on the hub state them
PUBLISHED = {"3b": 3_754_622_976, "7b": 8_292_166_656, "32b": 33_452_718_336, "72b": 73_410_777_344}


def build(config: dict[str, Any], rank: int = 0, vp_stage: int | None = None, **sizes: Any) -> Any:
    """A stage, as the backend has it built."""
    from mindspeed_mm.models.common.build_context import BuildContext, build_context
    from mindspeed_mm.models.megatron.vlm_model import VLModel
    from mindspeed_mm.parallel.sizes import ParallelSizes

    length, in_run = sizes.pop("seq_length", 64), sizes.pop("in_run", False)
    context = BuildContext(sizes=ParallelSizes(**sizes), pipeline_rank=rank, seq_length=length, in_run=in_run)
    with build_context(context):
        return VLModel.from_config(config, vp_stage)


def published_sizes() -> dict[str, Any]:
    """Size → (parameters of the stages, of transformers' model, trained ones, whether all are on meta)."""
    start()
    found = {}
    for size in PUBLISHED:
        config = json.loads((EXAMPLES / f"model_{size}.json").read_text())
        stages = len(config["text_decoder"].get("pipeline_num_layers", [0]))
        counts, trained, on_meta = 0, 0, True
        names: list[str] = []
        for rank in range(stages):
            chunk = build(config, rank, pipeline=stages)
            for name, param in chunk.named_parameters():
                counts += param.numel()
                trained += param.numel() * param.requires_grad
                on_meta &= param.is_meta
                names += chunk.param_mapping(name).sources
        meta_model = chunk.meta_model()
        assert sorted(names) == sorted(n for n, _ in meta_model.named_parameters())
        frozen = sum(p.numel() for p in meta_model.model.visual.parameters())
        found[size] = (counts, sum(p.numel() for p in meta_model.parameters()), counts - trained - frozen, on_meta)
    return found


def test_published_models_build_on_meta(megatron_pools: dict[int, RankPool]) -> None:
    (found,) = megatron_pools[1].run(published_sizes, timeout=120)
    for size, parameters in PUBLISHED.items():
        ours, theirs, difference_of_frozen, on_meta = found[size]
        assert ours == theirs == parameters, size
        assert difference_of_frozen == 0 and on_meta


def documented() -> list[str]:
    """The model types that docs/models.md says have a Megatron-core form."""
    rows = [line.split("|") for line in (ROOT / "docs" / "models.md").read_text().splitlines() if line[:2] == "| "]
    return [row[2].strip(" `") for row in rows if len(row) == 9 and row[7].strip() == "yes"]


def documented_sizes(folder: str) -> dict[str, tuple[int, int]]:
    """Documented family → parameters of a tiny model of it, as transformers builds it and as it is built here."""
    start()
    from tests.support.families import families

    found = {}
    for name in documented():
        hf_dir = families()[name].make(Path(folder) / name)
        chunk = build({"model_id": name, "init_from_hf_path": str(hf_dir)})
        counts = [sum(p.numel() for p in model.parameters()) for model in (chunk.meta_model(), chunk)]
        found[name] = (counts[0], counts[1])
    return found


def test_every_documented_family_is_accepted(megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Those of the table, which the pages for readers name too."""
    (found,) = megatron_pools[1].run(documented_sizes, str(tmp_path), timeout=120)
    assert list(found) == ["qwen2", "qwen2_5_vl", "qwen3"]
    assert all(ours == theirs for theirs, ours in found.values()), found
    words = {"qwen2_5_vl": "Qwen2.5-VL", "qwen3": "Qwen3", "qwen2": "Qwen2"}
    for page, line in (
        ("README.md", "Megatron-core (tensor, pipeline"),
        ("docs/own_model.md", "of Megatron-core's modules"),
        ("README.zh.md", "Megatron-core(张量"),
        ("docs/parallelism.md", "| families |"),
    ):
        (said,) = [text for text in (ROOT / page).read_text(encoding="utf-8").splitlines() if line in text]
        named = re.findall(r"Qwen\d(?:\.\d)?(?:-VL)?", said)
        assert sorted(named) == sorted(words[name] for name in found), (page, said)


def count_forwards(hf_dir: str, recompute: dict[str, Any]) -> tuple[int, int]:
    """Attention and MLP forward calls of a step of a text model with four layers, backward included."""
    start()
    from mindspeed_mm.backends.ptd import materialize_chunk

    model = build({"model_id": "qwen3", "init_from_hf_path": hf_dir}, recompute=recompute)
    materialize_chunk(model, torch.device("cpu"))
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.02)
    calls = {"attention": 0, "mlp": 0}

    def counted(kind: str) -> Any:
        def hook(*_: Any) -> None:
            calls[kind] += 1

        return hook

    for layer in model.text_decoder.decoder.layers:
        layer.self_attention.core_attention.register_forward_hook(counted("attention"))
        layer.mlp.register_forward_hook(counted("mlp"))
    ids = torch.randint(0, 90, (1, 8))
    model(**model.prepare({"input_ids": ids, "labels": ids}))["loss"].backward()
    return calls["attention"], calls["mlp"]


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        ({}, (4, 4)),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, (8, 8)),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}, (7, 7)),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9}, (8, 8)),
        ({"recompute_granularity": "selective"}, (8, 4)),
    ],
    ids=["off", "uniform", "block", "block, more than there are", "selective"],
)
def test_what_is_recomputed(
    recompute: dict[str, Any], expected: tuple[int, int], megatron_pools: dict[int, RankPool], deep_qwen3_dir: Path
) -> None:
    assert megatron_pools[1].run(count_forwards, str(deep_qwen3_dir), recompute) == [expected]


def refusals(text_dir: str, vl_dir: str) -> dict[str, str]:
    """What was asked for → the sentence."""
    start()
    from mindspeed_mm.utils.errors import MMError

    text = {"model_id": "qwen3", "init_from_hf_path": text_dir}
    vl = {"model_id": "qwen2_5_vl", "init_from_hf_path": vl_dir}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    asked = {
        "heads": lambda: build(text, tensor=3),
        "stages": lambda: build(text, pipeline=8),
        "length": lambda: build(text, pipeline=2, seq_length=None),
        "rope": lambda: build({**text, "init_from_hf_path": changed(text_dir, rope_parameters=rope)}),
        "activation": lambda: build({**text, "init_from_hf_path": changed(text_dir, hidden_act="gelu")}),
        "left": lambda: build(text).prepare(batch([[0, 1, 1]])),
        "long": lambda: build(text, pipeline=2, seq_length=2).prepare(batch([[1, 1, 1]])),
        "media": lambda: build(vl).prepare({**batch([[1, 1, 1]]), "image_grid_thw": torch.tensor([[1, 2, 2]])}),
    }
    said = {}
    for name, ask in asked.items():
        try:
            ask()
        except MMError as error:
            said[name] = str(error)
    return said


def batch(mask: list[list[int]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(len(mask), 3, dtype=torch.int64), "attention_mask": torch.tensor(mask)}


def changed(hf_dir: str, **fields: Any) -> str:
    """A directory whose config.json says something else."""
    import tempfile

    folder = Path(tempfile.mkdtemp())
    config = json.loads((Path(hf_dir) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return str(folder)


def test_refusals(megatron_pools: dict[int, RankPool], deep_qwen3_dir: Path, qwen2_5_vl_dir: Path) -> None:
    (said,) = megatron_pools[1].run(refusals, str(deep_qwen3_dir), str(qwen2_5_vl_dir))
    assert "--tensor-model-parallel-size 3: the model's num_attention_heads is 8" in said["heads"]
    assert "8 pipeline stages (--pipeline-model-parallel-size 8) for 4 language layers" in said["stages"]
    assert "--seq-length is missing" in said["length"] and "--variable-seq-lengths" in said["length"]
    assert "rope_type is 'yarn'" in said["rope"]
    assert "hidden_act is 'gelu'" in said["activation"]
    assert "padded on the left" in said["left"]
    assert "3 tokens, more than --seq-length 2" in said["long"]
    assert "0 tokens" in said["media"] and "for 1 merged patches (image_grid_thw)" in said["media"]


def told_freezes(vl_dir: str) -> list[str]:
    start()
    from mindspeed_mm.utils.log import logger

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        model = build({"model_id": "qwen2_5_vl", "init_from_hf_path": vl_dir})
    finally:
        logger.removeHandler(handler)
    trained = {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad}
    return [*lines, *sorted(trained)]


def test_default_freezes_are_told(megatron_pools: dict[int, RankPool], qwen2_5_vl_dir: Path) -> None:
    ((said, *trained),) = megatron_pools[1].run(told_freezes, str(qwen2_5_vl_dir))
    assert "image_encoder.vision_encoder.freeze" in said and "write false to train" in said
    assert trained == ["decoder", "embedding", "output_layer", "vision_projector"]


def first_weights(hf_dir: str) -> list[str]:
    """What a run says that would begin with random values beside weights, or without anybody asking for them."""
    start()
    from mindspeed_mm.utils.errors import ConfigError

    numbers = json.loads((EXAMPLES / "model_3b.json").read_text())
    said = []
    for config in ({"init_from_hf_path": hf_dir, "train_from_scratch": True}, {**numbers, "init_from_hf_path": None}):
        with pytest.raises(ConfigError) as error:
            build(config, in_run=True)
        said.append(str(error.value))
    build({"init_from_hf_path": hf_dir, "train_from_scratch": True, "ignore_weights": True}, in_run=True)
    return said


def test_random_values_are_asked_for(megatron_pools: dict[int, RankPool], qwen3_dir: Path) -> None:
    ((beside_weights, without),) = megatron_pools[1].run(first_weights, str(qwen3_dir))
    assert "holds weights (model.safetensors)" in beside_weights and '"ignore_weights": true' in beside_weights
    assert "no weights to start from: give 'init_from_hf_path'" in without


def unknown_family(hf_dir: str) -> str:
    start()
    from mindspeed_mm.models.common.families import require_megatron_form
    from mindspeed_mm.utils.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        require_megatron_form("internvl")
    return str(error.value)


def test_a_family_without_a_megatron_form(megatron_pools: dict[int, RankPool], qwen3_dir: Path) -> None:
    (said,) = megatron_pools[1].run(unknown_family, str(qwen3_dir))
    assert "model_type 'internvl' has no Megatron-core form here" in said
    assert "qwen2, qwen2_5_vl, qwen3" in said and "--use-torch-fsdp2" in said
