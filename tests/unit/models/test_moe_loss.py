"""The experts' load-balancing loss of samples in rows and packs, against transformers' own formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mindspeed_mm.models.common.loss import select_targets
from mindspeed_mm.models.common.moe_loss import AddGradient, RouterLoss, SampleShares, balance_loss, chosen_coefficient
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError
from tests.support.families import ernie4_5_vl_moe

EXPERTS, TOP_K, LAYERS = 6, 2, 3
LENGTHS = (5, 9, 1, 7)


def samples() -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Labels [length] and each layer's router output [length, experts] of four samples; the third has no target."""
    torch.manual_seed(0)
    made = []
    for length in LENGTHS:
        labels = torch.randint(0, 9, (length,))
        labels[: length // 2] = -100
        made.append((labels, [torch.randn(length, EXPERTS, requires_grad=True) for _ in range(LAYERS)]))
    return made


def own(sample: tuple[torch.Tensor, list[torch.Tensor]]) -> torch.Tensor:
    return load_balancing_loss_func(tuple(sample[1]), EXPERTS, TOP_K)


def expected_sum(weights: list[float]) -> torch.Tensor:
    return sum(w * own(s) for w, s in zip(weights, samples(), strict=True))


def rows_of(form: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Router outputs of a micro-batch [batch * sequence, experts] and what `SampleShares.of` is told of it."""
    made = samples()
    if form == "padded":
        width = max(LENGTHS)
        rows = [[i] for i in range(len(LENGTHS))]
    else:
        width = sum(LENGTHS[:3]) + 2
        rows = [[0, 1, 2], [3]]
    labels = torch.full((len(rows), width), -100)
    documents, logits = torch.zeros(len(rows), width, dtype=torch.long), torch.randn(LAYERS, len(rows), width, EXPERTS)
    for number, row in enumerate(rows):
        start = 0
        for place, index in enumerate(row):
            part = slice(start, start := start + LENGTHS[index])
            labels[number, part], documents[number, part] = made[index][0], place + 1
            logits[:, number, part] = torch.stack(made[index][1]).detach()
    told = {"documents": documents} if form == "packed" else {"attention_mask": (documents > 0).long()}
    return [layer.flatten(0, 1) for layer in logits], {"labels": labels, **told}


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("loss_type", ["per_token_loss", "per_sample_loss", "square_loss"])
def test_sum_over_samples_of_transformers_own(form: str, loss_type: Any) -> None:
    """Padding and neighbours in a row change nothing; weights are those of the token loss, and so is their sum."""
    logits, told = rows_of(form)
    labels, documents = told.pop("labels"), told.get("documents")
    targets = select_targets(labels, loss_type, documents)
    shares = SampleShares.of(targets, labels, **told)
    numbers = [max(0, int((labels[1:] != -100).sum())) for labels, _ in samples()]
    weigh = {"per_token_loss": float, "per_sample_loss": lambda n: float(n > 0), "square_loss": lambda n: n**0.5}
    weights = [weigh[loss_type](n) for n in numbers]
    assert shares.weights.tolist() == pytest.approx(weights, rel=1e-6)
    assert float(shares.weights.sum()) == pytest.approx(float(targets.denominator), rel=1e-6)
    torch.testing.assert_close(balance_loss(logits, TOP_K, shares), expected_sum(weights), rtol=1e-6, atol=1e-7)


def test_gradient_is_that_of_transformers_own() -> None:
    (labels, logits), ones = samples()[1], {"rtol": 1e-5, "atol": 1e-8}
    targets = select_targets(labels[None], "per_token_loss")
    shares = SampleShares.of(targets, labels[None])
    reported = torch.tensor(3.0, requires_grad=True)
    trained = AddGradient.apply(reported, 0.5 * balance_loss(logits, TOP_K, shares))
    assert float(trained.detach()) == 3.0
    trained.backward()
    assert float(reported.grad) == 1.0  # type: ignore[arg-type]
    reference = samples()[1]
    (0.5 * float(targets.denominator) * own(reference)).backward()
    for found, expected in zip(logits, reference[1], strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **ones)


def model_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_models_without_such_a_loss_are_refused() -> None:
    from transformers import DeepseekV3Config, Qwen3Config

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": 2}
    for config in (Qwen3Config(**sizes), DeepseekV3Config(**sizes, n_routed_experts=8, first_k_dense_replace=0)):
        with pytest.raises(ConfigError, match=r"is 0.1, but \w+ has no load-balancing loss.*write 0"):
            RouterLoss(model_of(config), 0.1)


def test_whose_coefficient_is_taken() -> None:
    """model.json's, if it says one; else the model's own, if its config asks for the loss."""
    from transformers import Qwen3MoeConfig, Qwen3VLMoeConfig

    asking = Qwen3MoeConfig(output_router_logits=True, router_aux_loss_coef=0.02)
    assert chosen_coefficient(None, asking) == 0.02
    assert chosen_coefficient(0.0, asking) == 0.0
    assert chosen_coefficient(None, Qwen3MoeConfig(router_aux_loss_coef=0.02)) == 0.0
    assert chosen_coefficient(0.3, Qwen3MoeConfig()) == 0.3
    text = {"output_router_logits": True, "router_aux_loss_coef": 0.04}
    assert chosen_coefficient(None, Qwen3VLMoeConfig(text_config=text)) == 0.04


def test_layers_recomputed_without_a_graph_are_refused() -> None:
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_key_value_heads": 2}
    model = model_of(Qwen3MoeConfig(**sizes, **experts)).to_empty(device="cpu")
    loss = RouterLoss(model, 0.1)
    labels = torch.ones(1, 5, dtype=torch.long)
    shares = SampleShares.of(select_targets(labels, "per_token_loss"), labels)
    loss.expect()
    with torch.no_grad():
        model(labels)
    with pytest.raises(ConfigError, match="use_reentrant: false"):
        loss.take(shares)
    loss.expect()
    with pytest.raises(ConfigError, match=r"ran on \[\] positions, expected 5"):
        loss.take(shares)


def test_routers_are_read_as_transformers_records_them(tmp_path: Path) -> None:
    """ERNIE 4.5 VL: the second output of a block, which runs other experts for the tokens of images."""
    from transformers import Ernie4_5_VLMoeForConditionalGeneration as Ernie

    folder = ernie4_5_vl_moe.make(tmp_path / "hf")
    plain = Ernie.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(10, 22)[None]
    ids[0, 4] = plain.config.image_start_token_id
    types = (ids == plain.config.image_start_token_id).long()
    expected = plain(input_ids=ids, moe_mm_token_type_ids=types, output_router_logits=True).aux_loss
    expected.backward()
    cfg = {"router_aux_loss_coef": 1.0}
    model = TransformersModel({"init_from_hf_path": str(folder), "loss_cfg": cfg})
    output: Any = model(**model.prepare({"input_ids": ids, "labels": ids}))
    found, weight = output["metrics"]["router_aux_loss"]
    assert float(found / weight) == pytest.approx(float(expected.detach()), rel=1e-6)
    (output["loss"] / weight).backward()
    name = "model.language_model.layers.0.mlp.vision_moe.gate.weight"
    gradient = plain.get_parameter(name).grad
    token_loss: Any = plain(input_ids=ids, moe_mm_token_type_ids=types).logits[0, :-1]
    torch.nn.functional.cross_entropy(token_loss, ids[0, 1:]).backward()
    assert torch.allclose(model.model.get_parameter(name).grad, gradient, rtol=1e-5, atol=1e-8)
