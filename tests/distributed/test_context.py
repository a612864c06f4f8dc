"""Context parallelism against plain transformers on each document alone: loss, norm and every gradient, fp32."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.transformers_model import TransformersModel
from mindspeed_mm.utils.errors import ConfigError
from tests.parity.test_families import case_of
from tests.support.families import families
from tests.support.launch import WRAP, WRAP_TEXT, launch_flags, metrics_of, run_entry, write_run_files
from tests.support.packs import ROWS, make_samples, pack
from tests.support.reference import rows_as_inputs, train_reference
from tests.support.split_tokens import Batch, PlainModel, Step, padded, step_on_ranks, text_documents
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset
from tests.support.workers import RankError, RankPool

LOSS_TOLERANCE, NORM_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5, 1e-5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ulysses 2": (2, {"context_parallel_size": 2}),
    "ulysses 4": (4, {"context_parallel_size": 4}),
    "ring 2": (2, {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}),
    "ring 4": (4, {"context_parallel_size": 4, "context_parallel_algo": "megatron_cp_algo"}),
    "2 by 2": (
        4,
        {"context_parallel_size": 4, "context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2},
    ),
}


@functools.cache
def folder(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))


@functools.cache
def directory(name: str) -> Path:
    """The tiny directory of a family; `llama, 1 kv head` is one whose query heads share one key and one value."""
    family, _, variant = name.partition(", ")
    path = families()[family].make(folder(name.replace(", ", "-")))
    if variant:
        import transformers

        from tests.support.families import randomize

        config = transformers.AutoConfig.from_pretrained(path)
        config.num_key_value_heads = 1
        randomize(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(path)
    return path


@pytest.fixture
def pool_of(ranks2: RankPool, ranks4: RankPool) -> Callable[[int], RankPool]:
    return {2: ranks2, 4: ranks4}.__getitem__


def check(found: Step, expected: Step) -> None:
    loss, norm, gradient, name = found.differences(expected)
    assert loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE
    assert gradient <= GRADIENT_TOLERANCE, name
    assert found.evaluated == pytest.approx(expected.loss, rel=LOSS_TOLERANCE)


# --- packed rows

# documents of one token, of odd lengths, one that ends where a shard does, ones that span shards; a filled-up last row
PACKED = ((1, 7, 27, 5), (20, 19), (1,), (13, 1, 1))


@functools.cache
def packed_rows() -> list[list[Batch]]:
    return [text_documents(lengths, seed) for seed, lengths in enumerate(PACKED)]


@functools.cache
def packed_reference(name: str) -> Step:
    return PlainModel(directory(name), [document for row in packed_rows() for document in row]).step()


def packed_step(
    name: str,
    layout: str,
    pool_of: Callable[[int], RankPool],
    model: dict[str, Any] | None = None,
    fsdp2: dict[str, Any] | None = None,
) -> Step:
    world, flags = LAYOUTS[layout]
    batches = [pack(packed_rows()[:2]), pack(packed_rows()[2:])]
    return pool_of(world).run(step_on_ranks, str(directory(name)), batches, flags, model, fsdp2, timeout=120)[0]


# sliding windows and sinks; values narrower than keys (MLA); one key head for four ranks
PACKED_ALWAYS = [
    ("gpt_oss", "ring 2"),
    ("deepseek_v3", "2 by 2"),
    ("llama, 1 kv head", "ulysses 4"),
]
PACKED_FAMILIES = (
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "llama, 1 kv head",
    "gemma3_text",
    "mixtral",
    "qwen2",
)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in PACKED_ALWAYS else pytest.mark.full)
        for name in PACKED_FAMILIES
        for layout in LAYOUTS
    ],
)
def test_packed_rows(name: str, layout: str, pool_of: Callable[[int], RankPool]) -> None:
    check(packed_step(name, layout, pool_of), packed_reference(name))


# --- padded rows


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt_oss", "ulysses 2"),
        pytest.param("gpt_oss", "ring 2", marks=pytest.mark.full),
        pytest.param("qwen3", "2 by 2", marks=pytest.mark.full),
        pytest.param("llama, 1 kv head", "ulysses 4", marks=pytest.mark.full),
    ],
)
def test_padded_rows(name: str, layout: str, side: str, pool_of: Callable[[int], RankPool]) -> None:
    """Rows of one document, padded at either end."""
    documents = text_documents((27, 7, 12, 1), seed=7)
    world, flags = LAYOUTS[layout]
    batches = [padded(documents[:3], side), padded(documents[3:], side)]
    found = pool_of(world).run(step_on_ranks, str(directory(name)), batches, flags, timeout=120)[0]
    check(found, PlainModel(directory(name), documents).step())


# --- images and videos


@functools.cache
def media_case() -> tuple[Path, list[Batch], Step]:
    """Qwen2.5-VL on packed rows with images and videos, some across the edge of a shard, and one row without any."""
    hf_dir = tiny_qwen2_5_vl_dir(folder("qwen2_5_vl"), seed=3)
    samples = [*make_samples(hf_dir), image_across_an_edge(hf_dir)]
    rows = [*ROWS, (1, 4), (len(samples) - 1,)]
    batches = [
        pack([[samples[number] for number in row] for row in part])
        for part in (rows[:2], rows[2:4], rows[4:5], rows[5:])
    ]
    documents = [samples[number] for row in rows for number in row]
    return hf_dir, batches, PlainModel(hf_dir, documents).step()


def image_across_an_edge(hf_dir: Path) -> Batch:
    """X01: seven tokens, those of an image on both sides of the middle of the eight that they are filled up to."""
    config = json.loads((hf_dir / "config.json").read_text())
    image = config["image_token_id"]
    ids = torch.tensor([[10, 11, config["vision_start_token_id"], image, image, 12, 13]])
    pixels = torch.randn(8, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(3))
    is_image = ids == image
    media = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 4]]), "mm_token_type_ids": is_image.long()}
    return {"input_ids": ids, "labels": ids.masked_fill(is_image, -100), **media}


@pytest.mark.parametrize(
    "layout", ["ring 2", *(pytest.param(n, marks=pytest.mark.full) for n in ("ulysses 2", "2 by 2"))]
)
def test_images_and_videos(layout: str, pool_of: Callable[[int], RankPool]) -> None:
    hf_dir, batches, expected = media_case()
    world, flags = LAYOUTS[layout]
    fsdp2 = {"sub_modules_to_wrap": WRAP}
    check(pool_of(world).run(step_on_ranks, str(hf_dir), batches, flags, None, fsdp2, timeout=120)[0], expected)


# with images that see themselves whole, chunks of attention, layers of linear attention or that share keys
REFUSED = ("ernie4_5_vl_moe", "gemma3", "gemma4", "gemma4_moe", "llama4", "qwen3_5", "qwen3_5_moe", "step3p7")
CAUSAL = [name for name, family in families().items() if family.outputs is None and name not in REFUSED]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gemma3" else pytest.mark.full) for n in REFUSED])
def test_what_is_not_known_to_be_causal_is_refused(name: str) -> None:
    """Before the model is built, in one sentence."""
    content = {"init_from_hf_path": str(case_of(name).hf_dir)}
    with (
        build_context(BuildContext(load_weights=False, defer_weights=True, dims=Dims(ring=2))),
        pytest.raises(
            ConfigError, match=r"^--context-parallel-size 2: \w+ has attention that isn't known to be causal"
        ),
    ):
        TransformersModel(content)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=pytest.mark.full)
        for name in CAUSAL
        for layout in ("ulysses 2", "ring 2", "2 by 2")
    ],
)
def test_families(name: str, layout: str, pool_of: Callable[[int], RankPool]) -> None:
    """Rows of all media and of none, each a micro-batch: features of images that join several layers (Qwen3-VL),
    positions in three dimensions or made by the model itself, sounds."""
    case, (world, flags) = case_of(name), LAYOUTS[layout]
    fsdp2 = {"sub_modules_to_wrap": list(case.family.wrap)}
    arguments = (str(case.hf_dir), case.inputs(), flags, dict(case.family.model), fsdp2)
    check(pool_of(world).run(step_on_ranks, *arguments, timeout=120)[0], plain_family(name))


@functools.cache
def plain_family(name: str) -> Step:
    return PlainModel(case_of(name).hf_dir, case_of(name).inputs()).step()


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("layout", ["ulysses 2", pytest.param("ring 2", marks=pytest.mark.full)])
def test_recomputed_blocks_see_the_same_tokens(
    layout: str, reentrant: bool, pool_of: Callable[[int], RankPool]
) -> None:
    fsdp2 = {"sub_modules_to_wrap": WRAP_TEXT, "recompute_modules": WRAP_TEXT, "use_reentrant": reentrant}
    check(packed_step("qwen3", layout, pool_of, fsdp2=fsdp2), packed_reference("qwen3"))


def step_of_different_rows(hf_dir: str, batches: list[Batch], flags: dict[str, Any]) -> None:
    step_on_ranks(hf_dir, batches[dist.get_rank() :], flags)


def test_ranks_that_share_rows_must_be_given_the_same(ranks2: RankPool) -> None:
    documents = [pack([row]) for row in packed_rows()[:2]]
    with pytest.raises(RankError, match="the 2 context-parallel ranks, which split the tokens of the same rows, were "):
        ranks2.run(step_of_different_rows, str(directory("qwen3")), documents, LAYOUTS["ulysses 2"][1], timeout=60)


# --- losses


def loss_of(loss_type: str, documents: Sequence[int], ranks: int) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """The loss of documents' token losses, as docs/losses says it.

    Args:
        documents: how many each micro-batch has.
        ranks: data-parallel ranks, which take micro-batches in turn.
    """

    def compute(losses: list[torch.Tensor]) -> torch.Tensor:
        trained = [loss for loss in losses if len(loss)]
        if loss_type == "per_token_loss":
            return torch.cat(losses).mean()
        if loss_type == "per_sample_loss":
            return torch.stack([loss.mean() for loss in trained]).mean()
        if loss_type == "square_loss":
            roots = torch.tensor([len(loss) ** 0.5 for loss in trained])
            return sum(root * loss.mean() for root, loss in zip(roots, trained, strict=True)) / roots.sum()
        micro_batches, rest = [], list(losses)
        for count in documents:
            micro_batches.append(torch.cat(rest[:count]))
            del rest[:count]
        if loss_type == "token_loss":
            micro_batches = [
                torch.cat(micro_batches[start : start + ranks]) for start in range(0, len(micro_batches), ranks)
            ]
        return torch.stack([losses.sum() / max(len(losses), 1) for losses in micro_batches]).mean()

    return compute


LOSS_TYPES = ("per_token_loss", "per_sample_loss", "square_loss", "token_loss", "default")


def steps_of_all_losses(hf_dir: str, batches: list[Batch], flags: dict[str, Any]) -> list[Step | None]:
    return [step_on_ranks(hf_dir, batches, flags, {"loss_cfg": {"loss_type": kind}}) for kind in LOSS_TYPES]


@pytest.mark.parametrize("layout", ["ulysses 2", pytest.param("ring 2", marks=pytest.mark.full)])
def test_every_loss_over_accumulated_micro_batches(layout: str, ranks4: RankPool) -> None:
    """Two data-parallel times two context-parallel ranks, two micro-batches each."""
    rows = packed_rows()
    model = PlainModel(directory("qwen3"), [document for row in rows for document in row])
    batches = [pack([row]) for row in rows]
    steps = ranks4.run(steps_of_all_losses, str(directory("qwen3")), batches, LAYOUTS[layout][1], timeout=120)[0]
    for kind, found in zip(LOSS_TYPES, steps, strict=True):
        expected = model.step(loss_of(kind, [len(row) for row in rows], ranks=2))
        loss, norm, gradient, name = found.differences(expected)
        assert loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE and gradient <= GRADIENT_TOLERANCE, (kind, name)


@pytest.mark.parametrize("layout", ["ulysses 2", "ring 2", pytest.param("2 by 2", marks=pytest.mark.full)])
def test_load_balancing_loss(layout: str, pool_of: Callable[[int], RankPool]) -> None:
    """L08: that of whole documents, as transformers computes it of each alone, over accumulated micro-batches."""
    coefficient = 0.1
    model = PlainModel(directory("qwen3_moe"), [d for row in packed_rows() for d in row], output_router_logits=True)
    targets = torch.tensor([len(losses) for losses in model.losses])

    def balance() -> torch.Tensor:
        return (torch.stack(model.balance_losses) * targets).sum() / targets.sum()

    expected = model.step(lambda losses: torch.cat(losses).mean() + coefficient * balance())
    expected.loss = float(torch.cat(model.losses).detach().mean())  # the other's value is reported by itself
    keys = {"loss_cfg": {"router_aux_loss_coef": coefficient}}
    found = packed_step("qwen3_moe", layout, pool_of, model=keys)
    check(found, expected)
    assert found.metrics["router_aux_loss"] == pytest.approx(float(balance().detach()), rel=LOSS_TOLERANCE)


# --- runs


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ulysses 2", "ring 2"])
def test_a_run_equals_a_hand_written_loop(layout: str, ranks2: RankPool, tmp_path: Path) -> None:
    """L06: the entry script on ranks that share rows: losses, norms, evaluation, rows and tokens of one process."""
    hf_dir = tiny_qwen3_dir(tmp_path / "hf", seed=3)
    data = write_mixed_dataset(tmp_path / "data", rows=8, seed=5, images=False)
    inputs = rows_as_inputs(hf_dir, data)
    losses, norms, _ = train_reference(hf_dir, inputs, 2)
    keys = {"dataset_param.basic_parameters.val_dataset": str(data)}
    files = write_run_files(tmp_path, hf_dir, data, data=keys, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    settings = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 2, "save": tmp_path / "run"}
    settings |= {"eval_interval": 1, "eval_iters": 1, "log_row_ids": True, "save_hf": True, **LAYOUTS[layout][1]}
    ranks2.run(run_entry, launch_flags(files, **settings), timeout=120)
    found = metrics_of(tmp_path / "run")
    assert found[0] == pytest.approx(losses, rel=LOSS_TOLERANCE)
    assert found[1] == pytest.approx(norms, rel=NORM_TOLERANCE)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(row["input_ids"].shape[1] for row in inputs)
    assert [r["consumed_tokens"] for r in records if "loss" in r] == [tokens, 2 * tokens]
    # after the first step, on the rows of the second
    evaluated = [
        next(value for name, value in r.items() if "valid" in name or "eval" in name)
        for r in records
        if "loss" not in r
    ]
    assert evaluated[0] == pytest.approx(losses[1], rel=LOSS_TOLERANCE)
    (rows,) = (tmp_path / "run" / "rows").iterdir()
    assert [sorted(json.loads(line)["rows"]) for line in rows.read_text().splitlines()] == [list(range(8))] * 2
    for config in (tmp_path / "run").rglob("config.json"):
        assert "context_parallel" not in config.read_text()
