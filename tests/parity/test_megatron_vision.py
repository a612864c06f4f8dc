"""The vision tower of Megatron-core's modules against transformers' on the same weights: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.megatron import start
from tests.support.workers import RankPool

PATCH = 4
SHALLOW = {"depth": 2, "num_heads": 2, "fullatt_block_indexes": [1]}
DEEP = {"depth": 4, "num_heads": 4, "fullatt_block_indexes": [1, 3]}
# frames, height and width in patches; windows have 4 by 4
GRIDS = {
    "one image": [[1, 8, 8]],
    "one window that is not full": [[1, 2, 2]],
    "several sizes": [[1, 8, 8], [1, 6, 10], [1, 2, 4], [1, 8, 8], [1, 4, 4]],
    "video and image": [[3, 6, 4], [1, 4, 8]],
}


def small_config(**changes: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 24, "patch_size": PATCH}
    config = transformers.Qwen2_5_VLConfig(vision_config={**sizes, "window_size": 4 * PATCH, **changes})
    return config.vision_config


def make_reference(config: Any) -> Any:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    torch.manual_seed(0)
    reference = Qwen2_5_VisionTransformerPretrainedModel._from_config(config)
    for param in reference.parameters():
        param.data.add_(torch.randn_like(param) * 0.05)  # norms and biases too
    return reference


def make_input(grids: list[list[int]], config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    grid = torch.tensor(grids)
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return torch.randn(int(grid.prod(-1).sum()), width), grid


def layout_of(grid: torch.Tensor, config: Any) -> Any:
    from mindspeed_mm.models.megatron.vision.qwen2_5_vl import PatchLayout

    return PatchLayout.of_grids(grid, config)


def build(config: Any, layers: range | None = None, *, first: bool = True, last: bool = True, **sizes: Any) -> Any:
    from mindspeed_mm.models.megatron.vision.qwen2_5_vl import Qwen2_5_VLImageEncoder
    from mindspeed_mm.parallel.sizes import ParallelSizes

    layers = range(config.depth) if layers is None else layers
    return Qwen2_5_VLImageEncoder(
        config, ParallelSizes(**sizes), layers=layers, has_patch_embedding=first, has_projector=last
    )


@torch.no_grad()
def fill(model: Any, reference: Any) -> None:
    """Give the model this rank's part of the reference's weights."""
    weights = {f"model.visual.{n}": p.detach() for n, p in reference.named_parameters()}
    for name, param in model.named_parameters():
        mapping = model.param_mapping(name)
        whole = mapping.join([weights[s] for s in mapping.sources])
        if getattr(param, "tensor_model_parallel", False):
            whole = whole.chunk(dist.get_world_size(), param.partition_dim)[dist.get_rank()]
        assert whole.shape == param.shape, name
        param.copy_(whole)


def gradients(model: Any, reference: Any) -> dict[str, torch.Tensor]:
    """Gradients of whole tensors, by transformers' names."""
    rows = {f"model.visual.{n}": len(p) for n, p in reference.named_parameters()}
    found = {}
    for name, param in model.named_parameters():
        gradient = param.grad
        assert gradient is not None, name
        if getattr(param, "tensor_model_parallel", False):
            parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, gradient.contiguous())
            gradient = torch.cat(parts, dim=param.partition_dim)
        mapping = model.param_mapping(name)
        found.update(zip(mapping.sources, mapping.split(gradient, [rows[s] for s in mapping.sources])))
    return found


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def compare(tensor_parallel: int) -> dict[str, float]:
    """Largest relative differences of this rank, by case and tensor."""
    start(tensor_parallel)
    found = {}
    for depth in (SHALLOW, DEEP):
        config = small_config(**depth)
        reference = make_reference(config)
        model = build(config, tensor=tensor_parallel)
        fill(model, reference)
        for case, grids in GRIDS.items():
            pixels, grid = make_input(grids, config)
            expected = reference(pixels, grid).pooler_output
            output = model(pixels, layout_of(grid, config))
            assert output.shape[1] == 1
            weights = torch.randn_like(expected)
            reference.zero_grad()
            model.zero_grad()
            (expected * weights).sum().backward()
            (output.squeeze(1) * weights).sum().backward()
            differences = {"output": relative(output.squeeze(1), expected)}
            ours = gradients(model, reference)
            theirs = {f"model.visual.{n}": p.grad for n, p in reference.named_parameters()}
            assert ours.keys() == theirs.keys()
            differences |= {n: relative(ours[n], gradient) for n, gradient in theirs.items()}
            found |= {f"{config.depth} layers, {case}: {n}": d for n, d in differences.items()}
    return found


@pytest.mark.parametrize("tensor_parallel", [1, 2], ids=["TP1", "TP2"])
def test_the_tower_equals_transformers(tensor_parallel: int, megatron_pools: dict[int, RankPool]) -> None:
    for found in megatron_pools[tensor_parallel].run(compare, tensor_parallel, timeout=120):
        worst = max(found, key=found.__getitem__)
        assert found[worst] < 1e-5, worst


def run(stages: list[Any], pixels: torch.Tensor, layout: Any) -> torch.Tensor:
    """The output of stages, each given the hidden states of the one before; a pipeline refuses to send views."""
    output = None
    for stage in stages:
        stage.set_input_tensor(output)
        output = stage(pixels if stage is stages[0] else None, layout)
        assert output._base is None
    return output


def split_in_stages() -> dict[str, Any]:
    start()
    config = small_config(**DEEP)
    reference = make_reference(config)
    cuts = {
        "in two": [(range(0, 1), True, False), (range(1, 4), False, True)],
        "projector apart": [(range(0, 4), True, False), (range(0), False, True)],
        "patch embedding apart": [(range(0), True, False), (range(0, 2), False, False), (range(2, 4), False, True)],
    }
    pixels, grid = make_input(GRIDS["several sizes"], config)
    whole = build(config)
    fill(whole, reference)
    expected = whole(pixels, layout_of(grid, config))
    expected.square().sum().backward()
    found: dict[str, Any] = {}
    for cut, parts in cuts.items():
        stages = [build(config, layers, first=first, last=last) for layers, first, last in parts]
        for stage in stages:
            fill(stage, reference)
        output = run(stages, pixels, layout_of(grid, config))
        output.square().sum().backward()
        ours: dict[str, torch.Tensor] = {}
        for stage in stages:
            ours |= gradients(stage, reference)
        theirs = gradients(whole, reference)
        assert ours.keys() == theirs.keys()
        found[cut] = torch.equal(output, expected) and all(torch.equal(ours[n], g) for n, g in theirs.items())
    return found


def test_stages_equal_the_whole_tower(megatron_pools: dict[int, RankPool]) -> None:
    (found,) = megatron_pools[1].run(split_in_stages)
    assert found == dict.fromkeys(["in two", "projector apart", "patch embedding apart"], True)


RECOMPUTE: dict[str, dict[str, Any]] = {
    "each layer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "more layers than there are": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 32,
    },
    "attention": {"recompute_granularity": "selective"},
}


def recompute() -> dict[str, tuple[bool, int]]:
    """For each setting: whether output and gradients are the same bits, and how often attention ran."""
    start()
    from mindspeed_mm.models.megatron.vision.segments import SegmentAttention

    config = small_config(**DEEP)
    reference = make_reference(config)
    pixels, grid = make_input(GRIDS["several sizes"], config)
    calls = []
    original = SegmentAttention.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(self)
        return original(self, *args, **kwargs)

    SegmentAttention.forward = counted  # type: ignore[method-assign]

    def step(frozen: str, settings: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = build(config, recompute=settings)
        fill(model, reference)
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(frozen))
        output = model(pixels, layout_of(grid, config))
        output.square().sum().backward()
        return output, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    found = {}
    for frozen in ("nothing", "vision_encoder.patch_embed", "vision_encoder", "vision_projector"):
        expected, theirs = step(frozen, {})
        assert not any(n.startswith(frozen) for n in theirs)
        for case, settings in RECOMPUTE.items():
            calls.clear()
            output, ours = step(frozen, settings)
            same = torch.equal(output, expected) and ours.keys() == theirs.keys()
            same = same and all(torch.equal(ours[n], g) for n, g in theirs.items())
            found[f"{case}, frozen: {frozen}"] = (same, len(calls))
    return found


def test_recomputing_changes_nothing(megatron_pools: dict[int, RankPool]) -> None:
    (found,) = megatron_pools[1].run(recompute)
    for case, (same, calls) in found.items():
        assert same, case
        assert calls == (4 if case.endswith("frozen: vision_encoder") else 8), case


def rotate_in_low_precision() -> dict[str, bool]:
    """For each dtype: whether attention within a segment gives the same bits as transformers'."""
    start()
    from mindspeed_mm.models.megatron.vision.segments import Segments, VisionSegments

    config = small_config(**SHALLOW)
    rows, head_size = 16, config.hidden_size // config.num_heads
    hidden, angles = torch.randn(rows, config.hidden_size), torch.randn(rows, head_size // 2).repeat(1, 2) * 40
    segments = VisionSegments(windows=Segments(((1, rows),)))
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        reference = make_reference(config)
        for linear in (reference.blocks[0].attn.qkv, reference.blocks[0].attn.proj):
            linear.bias.data.zero_()  # added before rounding there, after it here
        reference.to(dtype)
        model = build(config, params_dtype=dtype)
        fill(model, reference)
        theirs = reference.blocks[0].attn(
            hidden.to(dtype), torch.tensor([0, rows]), position_embeddings=(angles.cos(), angles.sin())
        )
        attention = model.vision_encoder.blocks.layers[0].self_attention
        inputs = {"rotary_pos_emb": angles[:, None, None], "packed_seq_params": segments}
        ours, _ = attention(hidden.to(dtype)[:, None], None, **inputs)
        found[str(dtype)] = torch.equal(ours[:, 0], theirs)
    return found


def test_positions_are_as_exact_as_transformers_in_low_precision(megatron_pools: dict[int, RankPool]) -> None:
    (found,) = megatron_pools[1].run(rotate_in_low_precision)
    assert found == {"torch.bfloat16": True, "torch.float16": True}


def lay_out() -> tuple[Any, Any]:
    from mindspeed_mm import accelerator

    accelerator.prepare_megatron()
    found = []
    for grids in ([[1, 40, 42]], [[1, 8, 8], [2, 4, 6], [1, 8, 8]]):
        segments = layout_of(torch.tensor(grids), small_config(**SHALLOW)).segments
        found.append([(part.groups, part.order is None) for part in (segments.windows, segments.whole)])
    return found[0], found[1]


def test_segments_of_equal_length_are_attended_to_in_one_call(megatron_pools: dict[int, RankPool]) -> None:
    ((image, several),) = megatron_pools[1].run(lay_out)
    # the last column of windows is half as wide; windows are in place, and a single image always is
    assert image == [(((10, 8), (100, 16)), True), (((1, 1680),), True)]
    assert several == [(((2, 8), (10, 16)), True), (((2, 24), (2, 64)), False)]


PUBLISHED = {"3B": (3420, 2048), "7B": (3420, 3584), "32B": (3456, 5120), "72B": (3456, 8192)}


def count_published() -> dict[str, tuple[int, int]]:
    """For each published size the parameters of the tower built without storage, and of transformers'."""
    start()
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    found = {}
    for name, (intermediate, out) in PUBLISHED.items():
        sizes = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "patch_size": 14, "window_size": 112}
        config = small_config(**sizes, intermediate_size=intermediate, out_hidden_size=out)
        with torch.device("meta"):
            parameters = [list(build(config).parameters())]
            parameters.append(list(Qwen2_5_VisionTransformerPretrainedModel._from_config(config).parameters()))
        assert all(p.is_meta for p in parameters[0])
        ours, theirs = (sum(p.numel() for p in part) for part in parameters)
        found[name] = (ours, theirs)
    return found


def test_published_sizes_have_as_many_parameters(megatron_pools: dict[int, RankPool]) -> None:
    (found,) = megatron_pools[1].run(count_published)
    assert found.keys() == PUBLISHED.keys()
    for size, (ours, theirs) in found.items():
        assert ours == theirs, size


def refusals() -> list[str]:
    start()
    from mindspeed_mm.models.megatron.vision.qwen2_5_vl import vision_config
    from mindspeed_mm.parallel.sizes import ParallelSizes
    from mindspeed_mm.utils.errors import ConfigError, DataError

    said = []
    for tensor, changes in (
        (8, {"num_heads": 16, "intermediate_size": 3420}),
        (4, {"num_heads": 2}),
        (1, {"hidden_act": "gelu"}),
        (1, {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    ):
        with pytest.raises(ConfigError) as refused:
            vision_config(small_config(**changes), ParallelSizes(tensor=tensor))
        said.append(str(refused.value))
    config = small_config(**SHALLOW)
    pixels, grid = make_input([[1, 4, 4]], config)
    with pytest.raises(DataError) as bad:
        build(config)(torch.cat([pixels, pixels]), layout_of(grid, config))
    return [*said, str(bad.value)]


def test_what_does_not_fit_is_refused(megatron_pools: dict[int, RankPool]) -> None:
    (said,) = megatron_pools[1].run(refusals)
    assert said[0] == (
        "--tensor-model-parallel-size 8: the vision tower's intermediate_size is 3420, which does not divide by it; "
        "smaller sizes that do: 1, 2, 4"
    )
    assert "num_heads is 2" in said[1] and said[1].endswith("sizes that do: 1, 2")
    assert "hidden_act is 'gelu'" in said[2]
    assert "rope_type is 'linear'" in said[3]
    assert said[4] == "32 patches came with grids of 16"
