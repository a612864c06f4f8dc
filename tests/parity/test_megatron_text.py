"""The decoder of Megatron-core's modules against transformers' model on the same weights: logits, loss, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.megatron import start
from tests.support.workers import RankPool

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": False},
    "qwen3 tied": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
}


def compare(family: str, tensor_parallel: int, sequence_parallel: bool) -> dict[str, float]:
    """Largest relative differences of this rank."""
    start(tensor_parallel)
    import transformers
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as mcore

    from mindspeed_mm.checkpoint.lazy import leaf
    from mindspeed_mm.checkpoint.megatron.parts import local_parameters, parameter_parts
    from mindspeed_mm.checkpoint.megatron.weights import fill
    from mindspeed_mm.models.common.families import require_megatron_form
    from mindspeed_mm.models.common.loss import LossOptions, select_targets
    from mindspeed_mm.models.megatron.text_decoder.gpt import build_language_model
    from mindspeed_mm.models.megatron.text_decoder.names import DecoderShape, decoder_tensor
    from mindspeed_mm.parallel.sizes import ParallelSizes

    torch.manual_seed(0)
    settings = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
    config = transformers.AutoConfig.for_model(**settings, **heads, **FAMILIES[family])
    reference = transformers.AutoModelForCausalLM.from_config(config)
    for param in reference.parameters():
        param.data.add_(torch.randn_like(param) * 0.05)  # norms and biases too

    sizes = ParallelSizes(tensor=tensor_parallel, sequence_parallel=sequence_parallel)
    model = build_language_model(
        config, sizes, require_megatron_form(config.model_type), tied=config.tie_word_embeddings
    )
    shape = DecoderShape(config.num_key_value_heads, tensor_parallel)
    weights = {n: p.detach() for n, p in reference.named_parameters()}

    def read(name: str, region: Any) -> torch.Tensor:
        return weights[name][tuple(slice(s, s + n) for s, n in region)]

    values = {n: leaf(n, w.shape, w.dtype, read).node for n, w in weights.items()}
    rank = parallel_state.get_tensor_model_parallel_rank()
    model.param_mapping = lambda name: decoder_tensor(name, shape)  # type: ignore[assignment]
    local = local_parameters([model], {n: tuple(w.shape) for n, w in weights.items()}, rank, tensor_parallel)
    fill(parameter_parts(local), values)

    ids = torch.randint(0, 96, (2, 16))
    labels = torch.randint(0, 96, (2, 16))
    positions = torch.arange(16).expand(2, -1)
    expected = reference(ids).logits
    expected_loss = torch.nn.functional.cross_entropy(
        expected[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    targets = select_targets(labels, "per_token_loss")
    expected_loss.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters()}
    found: dict[str, float] = {}
    for options in (LossOptions(), LossOptions(max_logits_mib=2e-3)):  # 5 of the 30 targets at a time, or 10
        embeddings = model.embedding(ids, None)
        if sequence_parallel:
            embeddings = mcore.scatter_to_sequence_parallel_region(embeddings)
        hidden = model(ids, positions, None, decoder_input=embeddings)
        logits = model.logits(hidden)
        model.zero_grad()
        loss = model.loss_sum(hidden, targets, options)
        loss.backward()
        differences = {"logits": relative(logits, expected), "loss": relative(loss, expected_loss)}
        differences |= compare_gradients(model, gradients, shape)
        found = {name: max(value, found.get(name, 0.0)) for name, value in differences.items()}
    assert set(found) - {"logits", "loss"} == set(gradients)
    return found


def compare_gradients(model: Any, expected: dict[str, Any], shape: Any) -> dict[str, float]:
    """Largest relative difference of each transformers parameter's gradient from the expected one."""
    from mindspeed_mm.models.megatron.text_decoder.names import decoder_tensor

    found = {}
    for name, param in model.named_parameters():
        gradient = param.grad
        assert gradient is not None
        if getattr(param, "sequence_parallel", False) or "q_layernorm" in name or "k_layernorm" in name:
            dist.all_reduce(gradient)  # parts of the sequence, or of the heads; finalize_model_grads does it in a run
        if getattr(param, "tensor_model_parallel", False):
            parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, gradient.contiguous())
            gradient = torch.cat(parts, dim=param.partition_dim)
        mapping = decoder_tensor(name, shape)
        for source, part in zip(mapping.sources, mapping.split(gradient, [len(expected[s]) for s in mapping.sources])):
            found[source] = relative(part, expected[source])
    return found


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.full if f == "qwen2 tied" else ()) for f in FAMILIES]
)
@pytest.mark.parametrize(
    ("tensor_parallel", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["TP1", "TP2", "TP2 SP"]
)
def test_the_decoder_equals_transformers(
    family: str, tensor_parallel: int, sequence_parallel: bool, megatron_pools: dict[int, RankPool]
) -> None:
    for found in megatron_pools[tensor_parallel].run(compare, family, tensor_parallel, sequence_parallel):
        worst = max(found, key=found.__getitem__)
        assert found[worst] < 1e-5, worst
        assert found["loss"] < 1e-6


def refuse(tensor_parallel: int, **changes: Any) -> str:
    import transformers

    from mindspeed_mm import accelerator
    from mindspeed_mm.utils.errors import ConfigError

    accelerator.prepare_megatron()
    from mindspeed_mm.configs.family_structure import FamilyStructure
    from mindspeed_mm.models.megatron.text_decoder.gpt import language_config
    from mindspeed_mm.parallel.sizes import ParallelSizes

    config = transformers.Qwen2Config(num_attention_heads=8, num_key_value_heads=4, **changes)
    with pytest.raises(ConfigError) as error:
        language_config(config, ParallelSizes(tensor=tensor_parallel), FamilyStructure(qkv_bias=True))
    return str(error.value)


def refusals() -> list[str]:
    windows = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 20}
    return [refuse(8), refuse(2, vocab_size=97), refuse(1, hidden_act="gelu"), refuse(1, **windows)]


def test_what_can_not_be_split_is_refused(megatron_pools: dict[int, RankPool]) -> None:
    (said,) = megatron_pools[1].run(refusals)
    assert "num_key_value_heads is 4" in said[0] and "sizes that do: 1, 2, 4" in said[0]
    assert "vocab_size is 97" in said[1]
    assert "hidden_act is 'gelu'" in said[2]
    assert "layer_types has 12 layers of sliding_attention" in said[3] and "--use-torch-fsdp2" in said[3]
