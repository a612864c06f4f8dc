"""model.json's `freeze`: patterns of modules and parameters that are not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError
from tests.support.reference import load_plain
from tests.support.tiny import tiny_qwen2_5_vl_dir


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2_5_vl_dir(tmp_path_factory.mktemp("hf"), seed=3)


def built(hf_dir: Path, *freeze: str, **more: Any) -> TransformersModel:
    with torch.device("meta"):
        return TransformersModel({"init_from_hf_path": str(hf_dir), "freeze": list(freeze), **more})


@pytest.mark.parametrize(
    ("pattern", "prefixes"),
    [
        ("model.visual", ("model.visual.",)),
        ("visual.merger", ("model.visual.merger.",)),  # of an older layout
        ("model.language_model.layers.{0}.mlp", ("model.language_model.layers.0.mlp.",)),
        (
            "model.language_model.layers.{*}.input_layernorm.weight",
            tuple(f"model.language_model.layers.{n}.input_layernorm.weight" for n in range(8)),
        ),
        ("lm_head.weight", ("lm_head.weight",)),
    ],
)
def test_what_a_pattern_freezes(hf_dir: Path, pattern: str, prefixes: tuple[str, ...]) -> None:
    model = built(hf_dir, pattern).model
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(prefixes)} != set()


def test_what_matches_nothing_is_an_error(hf_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        built(hf_dir, "model.visul", "lm_head.weigth", "model.language_model.layers.{0-9}", "lm_head")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("model.json: freeze: entry '") for line in lines) and len(lines) == 3
    for line, part in zip(lines, ["did you mean 'model.visual'", "its parameters: weight", "names index"], strict=True):
        assert part in line


def test_nothing_left_to_train(hf_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.json: everything is frozen \(text_decoder, model\.visual\..*, …\)"):
        built(hf_dir, "model.visual", text_decoder={"freeze": True})


def test_the_rest_is_trained_as_plain_transformers_does(hf_dir: Path) -> None:
    """Two steps of AdamW: the same losses and weights as with requires_grad False; frozen ones don't change."""
    patterns = ["model.language_model.layers.{0}", "lm_head.weight"]
    prefixes = ("model.language_model.layers.0.", "lm_head.weight")
    model = TransformersModel({"init_from_hf_path": str(hf_dir), "freeze": patterns})
    plain = load_plain(hf_dir, lambda name: name.startswith(prefixes))
    first = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    tokens = torch.arange(3, 19).reshape(2, 8)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, plain)]
    for _ in range(2):
        output = model(tokens, labels=tokens)
        loss = output["loss"] / output["denominator"]
        expected = plain(input_ids=tokens, labels=tokens).loss
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        for value, optimizer in zip((loss, expected), optimizers, strict=True):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in model.model.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(tensor, first[name]) == (name.startswith(prefixes) or "visual" in name)
    assert all(p.grad is None for name, p in model.model.named_parameters() if name.startswith(prefixes))
