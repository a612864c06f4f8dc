"""VLModel against transformers' Qwen2.5-VL on the same weights: logits, loss and every gradient, fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.megatron import start
from tests.support.workers import RankPool

IMAGE, VIDEO, START = 90, 91, 92
TOLERANCE = 1e-5
# name → images and videos of each row, as (time, height, width) in patches
BATCHES: dict[str, list[list[tuple[str, tuple[int, int, int]]]]] = {
    "one image": [[("image", (1, 4, 4))]],
    "several images of different sizes": [
        [("image", (1, 6, 10)), ("image", (1, 2, 4))],
        [("image", (1, 14, 6))],
        [],
    ],
    "a video": [[("video", (3, 4, 6))]],
    "a video between images": [[("image", (1, 4, 4)), ("video", (2, 6, 4)), ("image", (1, 2, 2))], []],
    "text only": [[], []],
}


def config(tie: bool) -> Any:
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    text = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "rope_parameters": rope,
    }
    text |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
    vision = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64}
    vision |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1, 3]}
    return transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        tie_word_embeddings=tie,
    )


def make_batch(media: list[list[tuple[str, tuple[int, int, int]]]]) -> dict[str, Any]:
    """Rows with text around their media, padded on the right to the longest."""
    rows, kinds = [], []
    pixels: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
    for number, row in enumerate(media):
        ids, kind = torch.randint(0, 80, (3 + number,)).tolist(), [0] * (3 + number)
        for medium, (t, h, w) in row:
            count = t * h * w // 4
            ids += [START] + [IMAGE if medium == "image" else VIDEO] * count + torch.randint(0, 80, (4,)).tolist()
            kind += [0] + [1 if medium == "image" else 2] * count + [0] * 4
            pixels[medium].append(torch.randn(t * h * w, 3 * 2 * 14 * 14))
            grids[medium].append((t, h, w))
        rows.append(ids)
        kinds.append(kind)
    longest = max(map(len, rows))
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([r + [0] * (longest - len(r)) for r in rows]),
        "mm_token_type_ids": torch.tensor([k + [0] * (longest - len(k)) for k in kinds]),
        "attention_mask": torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows]),
    }
    batch["labels"] = torch.randint(0, 80, batch["input_ids"].shape).masked_fill(batch["attention_mask"] == 0, -100)
    for medium, names in (
        ("image", ("pixel_values", "image_grid_thw")),
        ("video", ("pixel_values_videos", "video_grid_thw")),
    ):
        if pixels[medium]:
            batch[names[0]], batch[names[1]] = torch.cat(pixels[medium]), torch.tensor(grids[medium])
    return batch


def compare(tensor_parallel: int, sequence_parallel: bool, tie: bool) -> dict[str, dict[str, float]]:
    """Batch → what was compared → largest relative difference on this rank."""
    start(tensor_parallel)
    import transformers
    from megatron.core import parallel_state

    from mindspeed_mm.checkpoint.lazy import leaf
    from mindspeed_mm.checkpoint.megatron.parts import local_parameters, parameter_parts
    from mindspeed_mm.checkpoint.megatron.weights import fill
    from mindspeed_mm.models.common.families import require_megatron_form
    from mindspeed_mm.models.megatron.vlm_model import VLModel
    from mindspeed_mm.models.transformers.meta_model import build_meta_model
    from mindspeed_mm.parallel.pipeline import plan_stages
    from mindspeed_mm.parallel.sizes import ParallelSizes

    torch.manual_seed(0)
    hf_config = config(tie)
    reference = transformers.Qwen2_5_VLForConditionalGeneration(hf_config).train()
    with torch.no_grad():
        for param in reference.parameters():
            param.add_(torch.randn_like(param) * 0.05)  # norms and biases too
    (stage,) = plan_stages(1, None, text_layers=2, vision_layers=4)
    sizes = ParallelSizes(tensor=tensor_parallel, sequence_parallel=sequence_parallel)
    meta_model = build_meta_model(transformers.Qwen2_5_VLForConditionalGeneration, hf_config)
    model = VLModel(hf_config, require_megatron_form("qwen2_5_vl"), sizes, stage, meta_model)
    weights = {n: p.detach() for n, p in reference.named_parameters()}

    def read(name: str, region: Any) -> torch.Tensor:
        return weights[name][tuple(slice(s, s + n) for s, n in region)]

    values = {n: leaf(n, w.shape, w.dtype, read).node for n, w in weights.items()}
    rank = parallel_state.get_tensor_model_parallel_rank()
    local = local_parameters([model], {n: tuple(w.shape) for n, w in weights.items()}, rank, tensor_parallel)
    fill(parameter_parts(local), values)

    found = {}
    for name, media in BATCHES.items():
        model.zero_grad()
        reference.zero_grad()
        batch = make_batch(media)
        features = {k: v for k, v in batch.items() if k != "labels"}
        expected = reference(**features).logits
        ready = model.prepare(batch)
        unpadded = batch["attention_mask"].bool()
        logits = model(**{k: v for k, v in ready.items() if k != "targets"})[:, : expected.shape[1]]
        differences = {"logits": relative(logits[unpadded], expected[unpadded])}
        loss = model(**ready)["loss"]
        expected_loss = torch.nn.functional.cross_entropy(
            expected[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        differences["loss"] = relative(loss, expected_loss)
        loss.backward()
        expected_loss.backward()
        differences |= compare_gradients(model, reference, weights, tensor_parallel)
        found[name] = differences
    return found


def compare_gradients(model: Any, reference: Any, weights: dict[str, torch.Tensor], ranks: int) -> dict[str, float]:
    expected = {n: p.grad for n, p in reference.named_parameters()}
    found = {}
    for name, param in model.named_parameters():
        gradient = param.grad
        if gradient is None:  # the tower of a batch without media
            gradient = torch.zeros_like(param)
        if getattr(param, "sequence_parallel", False):
            dist.all_reduce(gradient)  # parts of the sequence; finalize_model_grads does it in a run
        if getattr(param, "tensor_model_parallel", False):
            parts = [torch.empty_like(gradient) for _ in range(ranks)]
            dist.all_gather(parts, gradient.contiguous())
            gradient = torch.cat(parts, dim=param.partition_dim)
        mapping = model.param_mapping(name)
        for source, part in zip(mapping.sources, mapping.split(gradient, [len(weights[s]) for s in mapping.sources])):
            if expected[source] is None:
                found[source] = float(part.abs().max())
            else:
                found[source] = relative(part, expected[source])
    assert set(found) == set(expected)
    return found


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-12))


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "tie"),
    [(1, False, False), (2, False, True), (2, True, False)],
    ids=["TP1", "TP2 tied", "TP2 SP"],
)
def test_equals_transformers(
    ranks: int, sequence_parallel: bool, tie: bool, megatron_pools: dict[int, RankPool]
) -> None:
    for found in megatron_pools[ranks].run(compare, ranks, sequence_parallel, tie, timeout=120):
        assert found.keys() == BATCHES.keys()
        for name, differences in found.items():
            worst = max(differences, key=differences.__getitem__)
            assert differences[worst] < TOLERANCE, (name, worst)
