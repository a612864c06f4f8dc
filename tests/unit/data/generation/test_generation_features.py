"""Features in files: written, killed, gone on with, read, trained on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.data import build_mm_dataloader
from mindspeed_mm.data.generation.build import build_generation_datasets
from mindspeed_mm.data.generation.feature_dataset import FeatureDataset
from mindspeed_mm.data.generation.feature_files import FeatureReader, FeatureWriter
from mindspeed_mm.data.generation.rule import GenerationRule
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from mindspeed_mm.utils.sample_random import sample_key
from tests.unit.data.generation.generation_maker import RULE, described

MADE_FROM = {"ae": "tiny", "dtype": "fp32"}
SHAPES = [(9, 32, 64), (9, 64, 32)]


def features(row: int, shape: tuple[int, int, int] = (9, 32, 64)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(row)
    frames, height, width = (shape[0] - 1) // 4 + 1, shape[1] // 8, shape[2] // 8
    states = torch.randn(12, 6, generator=generator).to(torch.bfloat16)
    states[5 + row % 3 :] = 0
    return {
        "latents": torch.randn(4, frames, height, width, generator=generator),
        "text.encoder_hidden_states": states,
        "text.encoder_attention_mask": (torch.arange(12) < 5 + row % 3).long(),
        "cond.image": torch.randn(4, 1, height, width, generator=generator),
        "cond.embeds": torch.randn(3, 5, generator=generator),
    }


def shape_of(row: int, mixed: bool) -> tuple[int, int, int]:
    return SHAPES[row % 3 // 2] if mixed else SHAPES[0]


def write(folder: Path, rows: Any = range(10), mixed: bool = False, **options: Any) -> Path:
    with FeatureWriter(folder, **{"made_from": MADE_FROM, "shard_bytes": 4000, **options}) as writer:
        writer.write_empty({name: torch.full_like(t, 9) for name, t in features(0).items() if name.startswith("text.")})
        for row in rows:
            writer.add(row, features(row, shape_of(row, mixed)), shape_of(row, mixed), f"caption {row}")
    return folder


def opened(path: Path, training: bool = True, rule: GenerationRule = RULE, **keys: Any) -> FeatureDataset:
    config = GenerationDataConfig.from_dict(described(path, "feature", **keys))
    datasets = build_generation_datasets(config, rule)
    dataset = datasets[0] if training else datasets[1]
    assert isinstance(dataset, FeatureDataset)
    return dataset


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert expected.keys() <= found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    assert len(list(tmp_path.glob("features-0-*.safetensors"))) > 2 and not list(tmp_path.glob(".*"))
    reader = FeatureReader([tmp_path])
    assert reader.rows.tolist() == list(range(10)) and reader.made_from == MADE_FROM
    for index in (3, 0, 9):
        same(reader.read(index), features(index))
    assert reader.shape_of(1, "text.encoder_hidden_states") == [12, 6]
    same(pickle.loads(pickle.dumps(reader)).read(2), features(2))
    assert reader.captions() == [f"caption {row}" for row in range(10)]


def test_padding_isn_t_kept_but_minus_zero_is(tmp_path: Path) -> None:
    padded, negative, nothing = torch.zeros(1000, 8), torch.zeros(1000, 8), torch.zeros(1000, 8)
    padded[2], negative[998] = 1.0, -0.0
    with FeatureWriter(tmp_path) as writer:
        tensors = {"text.padded": padded, "text.negative": negative, "text.nothing": nothing}
        writer.add(0, {"latents": torch.zeros(4, 1, 2, 2), **tensors, "text.scalar": torch.tensor(2.0)}, (1, 16, 16))
    sample = FeatureReader([tmp_path]).read(0)
    assert all(torch.equal(sample[name], tensor) for name, tensor in tensors.items())
    assert torch.signbit(sample["text.negative"][998]).all() and sample["text.scalar"] == 2
    (shard,) = tmp_path.glob("features-*.safetensors")
    assert shard.stat().st_size < 50_000


def test_a_killed_writer_is_gone_on_with(tmp_path: Path) -> None:
    """Half a shard, a shard without its lines, half a line; and with other ranks than before."""
    writer = FeatureWriter(tmp_path, made_from=MADE_FROM, shard_bytes=1 << 20)
    for row in range(4):
        writer.add(row, features(row), SHAPES[0])
    writer.flush()
    writer.add(4, features(4), SHAPES[0])  # never durable
    (tmp_path / ".features-0-1.safetensors.tmp").write_bytes(b"half")
    (tmp_path / "features-0-7.safetensors").write_bytes(b"without lines")
    (tmp_path / "features-1-0.safetensors").write_bytes(b"of a rank that isn't there any more")
    index = tmp_path / "index-0.jsonl"
    index.write_bytes(index.read_bytes() + b'{"row": 9, "fi')
    assert len(FeatureReader([tmp_path])) == 4  # a reader takes what is whole
    again = FeatureWriter(tmp_path, made_from=MADE_FROM)
    assert again.done == {0, 1, 2, 3} and again.rows(7) == [4, 5, 6]
    assert {path.name for path in tmp_path.iterdir()} == {"features-0-0.safetensors", "features.json", "index-0.jsonl"}
    two = [FeatureWriter(tmp_path, rank, 2, MADE_FROM) for rank in (0, 1)]
    assert [part.rows(7) for part in two] == [[4, 6], [5]]
    for part in two:
        for row in part.rows(7):
            part.add(row, features(row), SHAPES[0])
        part.close()
    reader = FeatureReader([tmp_path])
    assert reader.rows.tolist() == list(range(7))
    for row in range(7):
        same(reader.read(row), features(row))


def test_features_of_something_else_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r'were made with ae "tiny", and now it is "other"; write to another folder'):
        FeatureWriter(tmp_path, made_from={**MADE_FROM, "ae": "other"})
    with pytest.raises(ConfigError, match="were made with more null, and now it is 1"):
        FeatureWriter(tmp_path, made_from={**MADE_FROM, "more": 1})


def test_what_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder or index of features"):
        FeatureReader([tmp_path / "nothing" / "data.jsonl"])
    with pytest.raises(DataError, match=r"no index-<rank>\.jsonl in it; was the feature extraction run"):
        FeatureReader([tmp_path])
    pickles = tmp_path / "data.jsonl"
    pickles.write_text('{"file": "features/0.pt", "captions": "x"}\n')
    with pytest.raises(DataError, match=r"line 1: features in \.pt files are pickles.*running the feature extraction"):
        FeatureReader([pickles])
    pickles.write_text('{"file": "0.safetensors"}\n')
    with pytest.raises(DataError, match="line 1: expected row, file, key, frames"):
        FeatureReader([pickles])


def test_samples(tmp_path: Path) -> None:
    write(tmp_path)
    dataset = opened(tmp_path)
    sample = dataset.get(3, 0, 2)
    same(sample, features(3))
    assert (sample["row_id"], sample["sample_key"], sample["num_tokens"]) == (3, sample_key(7, 3, 2), 3 * 2 * 4)
    batch = dataset.collate_fn([dataset[1], dataset[2], dataset[-1]])
    assert batch["latents"].shape == (3, 4, 3, 4, 8) and batch["text.encoder_hidden_states"].shape == (3, 12, 6)
    assert batch["sample_weights"].tolist() == [1, 1, 0] and not batch["latents"][2].any()
    assert (batch["text.encoder_hidden_states"][2] == 9).all() and "captions" not in batch


def test_published_paths_stand_for_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "sora_features")
    whole = opened(tmp_path / "sora_features" / "index-0.jsonl")
    named = opened(tmp_path / "sora_features" / "data.jsonl")
    elsewhere = opened(tmp_path / "old" / "data.jsonl", basic_data_folder=str(tmp_path / "sora_features"))
    assert len(whole) == len(named) == len(elsewhere) == 10
    both = opened(tmp_path / "sora_features", basic_val_data_path=str(tmp_path / "sora_features"), training=False)
    assert not both.training
    write(tmp_path / "more", rows=(4, 7))
    reader = FeatureReader([tmp_path / "sora_features", tmp_path / "more"])
    assert reader.rows.tolist() == [*range(10), 14, 17]
    same(reader.read(11), features(7))


def test_captions_are_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    rule = GenerationRule(**{**RULE.__dict__, "text_dropout": 0.5})
    dataset = opened(tmp_path, rule=rule)
    empty = [bool((dataset.get(r, 0, e)["text.encoder_hidden_states"] == 9).all()) for e in range(6) for r in range(10)]
    assert 15 < sum(empty) < 45
    assert empty[:10] == [bool((dataset[r]["text.encoder_attention_mask"] == 9).all()) for r in range(10)]
    valid = opened(tmp_path, rule=rule, basic_val_rate=0.5, training=False)
    assert len(valid) == 5 and not any((valid[r]["text.encoder_hidden_states"] == 9).all() for r in range(5))
    (tmp_path / "empty.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"captions are left out with a probability of 0\.5, and there are no text"):
        opened(tmp_path, rule=rule)
    with pytest.raises(ConfigError, match=r"probability of 0\.1"):  # what is published where nothing is said
        opened(tmp_path, rule=GenerationRule(**{**RULE.__dict__, "text_dropout": None}))


def test_captions_that_were_not_encoded(tmp_path: Path) -> None:
    with FeatureWriter(tmp_path) as writer:
        for row in (5, 2):
            writer.add(row, {"latents": features(row)["latents"]}, SHAPES[0], f"caption {row}")
    dataset = opened(tmp_path)
    batch = dataset.collate_fn([dataset[0], dataset[1], dataset[-1]])
    assert batch["captions"] == ["caption 2", "caption 5", ""]
    dropped = opened(tmp_path, rule=GenerationRule(**{**RULE.__dict__, "text_dropout": 1.0}))
    assert dropped[0]["caption"] == ""


def test_a_damaged_file_is_left_out_or_ends_the_run(tmp_path: Path) -> None:
    write(tmp_path)
    reader = FeatureReader([tmp_path])
    first, path = (Path(reader.where(row).split(",")[0]) for row in (0, 9))
    for damaged in (first, path):
        damaged.write_bytes(damaged.read_bytes()[:100])
    sample = opened(tmp_path)[9]
    assert sample["fault"] == "features can't be read" and path.name in sample["note"] and not sample["latents"].any()
    with pytest.raises(BadSample, match="features can't be read"):
        opened(tmp_path, basic_on_bad_sample="raise")[9]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["latents", "text.encoder_hidden_states", "cond.image"])
def test_features_that_are_no_numbers(tmp_path: Path, name: str, value: float) -> None:
    """L07: left out and counted, or the end of the run; a mask of integers is no matter."""
    with FeatureWriter(tmp_path, made_from=MADE_FROM) as writer:
        writer.write_empty({key: tensor for key, tensor in features(0).items() if key.startswith("text.")})
        for row in range(2):
            tensors = features(row)
            if row:
                tensors[name].view(-1)[3] = value
            writer.add(row, tensors, SHAPES[0])
    dataset = opened(tmp_path)
    assert "fault" not in dataset[0]
    sample = dataset[1]
    assert sample["fault"] == "features can't be read" and f"{name} has 1 of " in sample["note"]
    with pytest.raises(BadSample, match=r"sample 1: .* values that are NaN or infinite"):
        opened(tmp_path, basic_on_bad_sample="raise")[1]


def test_states_of_nothing_that_are_no_numbers(tmp_path: Path) -> None:
    """L07: those that take the place of captions that are left out."""
    with FeatureWriter(tmp_path, made_from=MADE_FROM) as writer:
        states = {name: tensor for name, tensor in features(0).items() if name.startswith("text.")}
        writer.write_empty({**states, "text.encoder_hidden_states": torch.full((12, 6), float("nan"))})
        writer.add(0, features(0), SHAPES[0])
    with pytest.raises(DataError, match=r"empty\.safetensors: text\.encoder_hidden_states has 72 of 72 values"):
        opened(tmp_path, rule=dataclasses.replace(RULE, text_dropout=0.1))[0]


def test_shapes_of_another_autoencoder(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=r"features of 9×32×64 .* can't be of a larger one, which takes k·8 \+ 1"):
        opened(tmp_path, rule=GenerationRule(8, 48, text_dropout=0.0, made_by="a larger one"))


def test_features_of_another_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "features", made_from={"predictor": "wan", "ae.do_sample": False})
    wan = dataclasses.replace(RULE, features_of={"predictor": "wan", "ae.do_sample": False, "ae.norm_mode": None})
    assert len(opened(folder, rule=wan)) == 10
    with pytest.raises(ConfigError, match=r"made with predictor 'wan', and model.json says 'flux'"):
        opened(folder, rule=dataclasses.replace(RULE, features_of={"predictor": "flux"}))
    with pytest.raises(ConfigError, match=r"made with ae\.do_sample false, and model.json says true"):
        opened(folder, rule=dataclasses.replace(RULE, features_of={"predictor": "wan", "ae.do_sample": True}))
    told = dataclasses.replace(RULE, needs_conditions=True)
    assert len(opened(folder, rule=told)) == 10
    plain = tmp_path / "plain"
    with FeatureWriter(plain, made_from={}) as writer:
        writer.add(0, {"latents": features(0)["latents"], "text.states": torch.ones(2, 3)}, SHAPES[0], "caption")
    with pytest.raises(ConfigError, match="have no tensor of a first frame"):
        opened(plain, rule=told)


def test_batches_of_several_shapes(tmp_path: Path) -> None:
    """Latents that are left over are cut to what they have in common; every row comes once."""
    write(tmp_path, mixed=True)
    dataset = opened(tmp_path)
    loader = build_mm_dataloader(dataset, {"drop_last": False}, micro_batch_size=2, global_batch_size=4, seed=3)
    batches = list(itertools.islice(iter(loader), 6))
    rows = [row for batch in batches for row in batch["row_ids"].tolist()]
    assert sorted(rows) == [-1, -1, *range(10)]
    sizes = [tuple(batch["latents"].shape[2:]) for batch in batches]
    assert {(3, 4, 8), (3, 4, 4)} <= set(sizes)
    for batch in batches:
        for row, latents, image in zip(batch["row_ids"].tolist(), batch["latents"], batch["cond.image"], strict=True):
            if row < 0:
                assert not latents.any()
                continue
            whole = features(row, shape_of(row, True))
            top, left = ((whole["latents"].shape[axis] - latents.shape[axis]) // 2 for axis in (2, 3))
            rows_cut, columns_cut = slice(top, top + latents.shape[2]), slice(left, left + latents.shape[3])
            assert torch.equal(latents, whole["latents"][:, :, rows_cut, columns_cut])
            assert torch.equal(image, whole["cond.image"][:, :, rows_cut, columns_cut])
        height, width = batch["latents"].shape[3:]
        assert batch["num_tokens"] == batch["num_rows"] * 3 * (height // 2) * (width // 2)


def test_lengths_of_text_may_differ(tmp_path: Path) -> None:
    with FeatureWriter(tmp_path) as writer:
        for row, length in enumerate((3, 5)):
            states = {"text.states": torch.ones(length, 2), "text.mask": torch.ones(length)}
            writer.add(row, {"latents": torch.zeros(4, 1, 2, 2), **states}, (1, 16, 16))
    dataset = opened(tmp_path)
    batch = dataset.collate_fn([dataset[0], dataset[1]])
    assert batch["text.mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5] and batch["text.states"][0].sum() == 6


def test_index_lines(tmp_path: Path) -> None:
    write(tmp_path, rows=[3])
    (line,) = (tmp_path / "index-0.jsonl").read_text().splitlines()
    expected = {"row": 3, "file": "features-0-0.safetensors", "key": "3", "frames": 9, "height": 32, "width": 64}
    assert json.loads(line) == {**expected, "caption": "caption 3"}
    with pytest.raises(ValueError, match="tensor 'video'; expected latents"):
        tensors = {"latents": torch.zeros(1), "video": torch.zeros(1)}
        FeatureWriter(tmp_path, made_from=MADE_FROM).add(4, tensors, SHAPES[0])
