"""`dataset_type: corpus`: rows and their order equal Megatron-core's GPTDataset, and losses equal plain transformers.

The workers are those that have megatron imported already; what runs in them is the FSDP2 backend.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import launch_flags, metrics_of, run_entry, write_run_files
from tests.support.reference import train_reference
from tests.support.tiny import WORDS, tiny_qwen3_dir
from tests.support.workers import RankPool

LENGTH, STEPS, ROWS, SEED = 24, 4, 4, 11
#: enough documents for some epochs within a run, of 1 to 30 words
DOCUMENTS = 16


@functools.cache
def texts() -> list[str]:
    chosen = random.Random(5)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(1, 14))) for _ in range(DOCUMENTS)]


@functools.cache
def hf_dir() -> Path:
    return tiny_qwen3_dir(Path(tempfile.mkdtemp(prefix="corpus-")) / "hf", seed=3, tie=False)


def write_texts(folder: Path) -> str:
    """The documents in a parquet file, a jsonl file and a text file; their names in data.json."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": texts()[:5]}), folder / "a.parquet")
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts()[5:12]))
    (folder / "c.txt").write_text("\n\n".join(texts()[12:]) + "\n")
    return "a.parquet, b.jsonl, c.txt"


def data_of(folder: Path, **corpus: Any) -> dict[str, Any]:
    """What the corpus changes of data.json, by dotted paths."""
    basic = {"dataset": write_texts(folder), "dataset_dir": str(folder), "cache_dir": str(folder / "index")}
    return {
        "dataset_param.dataset_type": "corpus",
        "dataset_param.corpus": {"append_eod": True, **corpus},
        **{f"dataset_param.basic_parameters.{key}": value for key, value in basic.items()},
    }


def rows_of_megatron(folder: Path, split: str) -> list[dict[str, torch.Tensor]]:
    """Rows for a run and for a pass of validation that Megatron-core's own builder makes of the same documents."""
    import numpy as np
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf_dir())

    class Tokens:
        eod, vocab_size, unique_identifiers = tokenizer.eos_token_id, len(tokenizer), {"name": "test"}

    folder.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(folder / "own.bin"), dtype=np.int32)
    for text in texts():
        ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(folder / "own.idx"))
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=([str(folder / "own")], None),
        split=split,
        path_to_cache=str(folder / "cache"),
        tokenizer=Tokens(),
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=False,
    )
    parts = BlendedMegatronDatasetBuilder(GPTDataset, [STEPS * ROWS, None, None], lambda: True, config).build()
    return [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in parts if part is not None]


def batches_of_loader(words: list[str], position: int, count: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Micro-batches of this rank's training loader from a position on, and facts about the data."""
    import torch.distributed as dist

    from mindspeed_mm.configs.describe import describe
    from mindspeed_mm.data.loading.providers import build_run_data
    from mindspeed_mm.data.start import DataStart
    from mindspeed_mm.tasks.train.language import TRANSFORMERS

    run = describe(words, TRANSFORMERS)
    start = DataStart(dist.get_rank(), dist.get_world_size(), position)
    data = build_run_data(TRANSFORMERS.data, run, start)
    batches = [next(data.train) for _ in range(count)]
    assert data.state_dict is not None and data.where is not None
    facts = {
        "state": data.state_dict(),
        "where": data.where(int(batches[0]["row_ids"][0])),
        "per_epoch": data.global_batches_per_epoch,
        "valid": None if data.valid is None else next(data.valid.fresh_iterator()),
    }
    data.close()
    return batches, facts


def words_of(folder: Path, data: dict[str, Any], **flags: Any) -> list[str]:
    files = write_run_files(folder, hf_dir(), folder / "unused", data=data, fsdp2={"sub_modules_to_wrap": []})
    sizes = {"micro_batch_size": 2, "global_batch_size": ROWS, "seq_length": LENGTH, "seed": SEED, "eval_interval": 0}
    return launch_flags(files, **{**sizes, "train_iters": STEPS, **flags})


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_and_order_are_megatrons(ranks: int, megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Some epochs of it, over ranks, from a position on, with the next token of each row's last as a target."""
    pool = megatron_pools[ranks]
    ((expected, valid),) = megatron_pools[1].run(rows_of_megatron, tmp_path / "own", "75,25,0")
    words = words_of(tmp_path, data_of(tmp_path, split="75,25,0"), eval_interval=1, eval_iters=1)
    assert len(expected["tokens"]) >= STEPS * ROWS
    for position in (0, 2 * ROWS):
        per_rank = ROWS // (2 * ranks)
        found = pool.run(batches_of_loader, words, position, per_rank * (STEPS - position // ROWS))
        for rank, (batches, facts) in enumerate(found):
            for number, batch in enumerate(batches):
                first = position + (number * ranks + rank) * 2
                assert batch["row_ids"].tolist() == [first, first + 1]
                assert torch.equal(batch["input_ids"], expected["tokens"][first : first + 2])
                assert torch.equal(batch["labels"], expected["labels"][first : first + 2])
            assert facts["state"]["consumed_samples"] == STEPS * ROWS
            assert 0 < facts["per_epoch"] < STEPS / 2
            assert any(f"{name}, " in facts["where"] for name in ("a.parquet", "b.jsonl", "c.txt"))
            own = valid["tokens"][rank * 2 : rank * 2 + 2]
            assert len(valid["tokens"]) and facts["valid"]["num_rows"] == len(own)
            assert torch.equal(facts["valid"]["input_ids"][: len(own)], own)
            assert (facts["valid"]["labels"][len(own) :] == -100).all()


def documents_of(ids: torch.Tensor, eod: int) -> torch.Tensor:
    """The number of each token's document within its row, by a loop."""
    numbers, number = [], 1
    for token in ids.tolist():
        numbers.append(number)
        number += token == eod
    return torch.tensor(numbers)


def plain_outputs(resets: bool, restarts: bool, eod: int) -> Any:
    """Logits and next tokens of a row under plain transformers, with a mask and positions made by hand."""

    def outputs(model: Any, row: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = row["input_ids"]
        length = ids.shape[1]
        seen = torch.ones(length, length).tril().bool()
        positions = torch.arange(length)
        if resets:
            numbers = documents_of(ids[0], eod)
            seen &= numbers[:, None] == numbers[None]
            if restarts:
                positions = torch.tensor([int((numbers[:place] == numbers[place]).sum()) for place in range(length)])
        logits = model(input_ids=ids, attention_mask=seen[None, None], position_ids=positions[None]).logits
        return logits[0].float(), row["labels"][0]

    return outputs


CASES = {
    "plain": {"append_eod": False},
    "ends": {},
    "masked": {"reset_attention_mask": True},
    "masked, positions": {"reset_attention_mask": True, "reset_position_ids": True},
    "masked, split tokens": {"reset_attention_mask": True},
}
FLAGS: dict[str, dict[str, Any]] = {"masked, split tokens": {"context_parallel_size": 2}}


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (1, "ends"),
        (2, "masked, positions"),
        pytest.param(1, "masked", marks=pytest.mark.full),
        pytest.param(2, "plain", marks=pytest.mark.full),
        *(pytest.param(4, name, marks=pytest.mark.full) for name in CASES),
    ],
)
def test_losses_are_those_of_transformers(
    ranks: int, name: str, megatron_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    data = data_of(tmp_path, **CASES[name])
    options = {"micro_batch_size": 1, "save": tmp_path / "run", "no_save_optim": True, "log_row_ids": True}
    options |= FLAGS.get(name, {})
    words = words_of(tmp_path, data, **options)
    pool = megatron_pools[ranks]
    pool.run(run_entry, words, timeout=120)
    ((batches, _),) = megatron_pools[1].run(
        batches_of_loader, words_of(tmp_path, data, micro_batch_size=1), 0, STEPS * ROWS
    )
    rows = [{"input_ids": batch["input_ids"], "labels": batch["labels"]} for batch in batches]
    eod = json.loads((hf_dir() / "config.json").read_text())["eos_token_id"]
    has_mask, restarts = (CASES[name].get(key, False) for key in ("reset_attention_mask", "reset_position_ids"))
    assert has_mask == ("documents" in batches[0])
    if has_mask:
        assert all(torch.equal(batch["documents"][0], documents_of(batch["input_ids"][0], eod)) for batch in batches)
        assert max(int(batch["documents"].max()) for batch in batches) > 2
    expected, norms, _ = train_reference(
        hf_dir(),
        rows,
        STEPS,
        rows_of=lambda step: list(range(step * ROWS, (step + 1) * ROWS)),
        outputs=plain_outputs(has_mask, restarts, eod),
    )
    losses, found_norms = metrics_of(tmp_path / "run")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert found_norms == pytest.approx(norms, rel=1e-4)
    records = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in record]
    assert [record["consumed_samples"] for record in records] == [ROWS * (step + 1) for step in range(STEPS)]


def build(folder: str, basic: dict[str, Any], corpus: dict[str, Any], words: list[str]) -> Any:
    """Rows of a corpus in this process, or the error's text."""
    from mindspeed_mm.configs.describe import describe
    from mindspeed_mm.data.loading.corpus import corpus_rows
    from mindspeed_mm.tasks.train.language import TRANSFORMERS
    from mindspeed_mm.utils.errors import MMError

    data = {
        "dataset_type": "corpus",
        "corpus": corpus,
        "basic_parameters": {"dataset_dir": folder, "cache_dir": f"{folder}/index", **basic},
        "preprocess_parameters": {"model_name_or_path": str(hf_dir())},
    }
    Path(folder, "data.json").write_text(json.dumps({"dataset_param": data}))
    try:
        run = describe([*words, "--mm-data", f"{folder}/data.json"], TRANSFORMERS)
        rows, _ = corpus_rows(run, run.data.dataset_param, None)  # type: ignore[union-attr]
    except MMError as error:
        return str(error)
    return [rows[number]["input_ids"].tolist() for number in range(len(rows))]


def broken_and_again(folder: str, words: list[str]) -> tuple[str, list[str], Any]:
    """A build that is interrupted halfway, what it left, and the next one."""
    from mindspeed_mm.data.loading import corpus_index

    whole, basic = corpus_index.write_documents, {"dataset": "a.parquet, b.jsonl, c.txt"}

    folders = {path.name for path in Path(folder, "index").iterdir()}

    def interrupted(prefix: Path, documents: Any, vocabulary: int) -> None:
        Path(f"{prefix}.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    corpus_index.write_documents = interrupted
    try:
        build(folder, basic, {}, words)
    except KeyboardInterrupt:
        broken = "interrupted"
    finally:
        corpus_index.write_documents = whole
    left = [path for path in Path(folder, "index").iterdir() if path.name not in folders]
    killed = left[0].with_suffix(".12345.tmp")  # what a build that is killed leaves
    killed.mkdir()
    (killed / "documents.bin").write_bytes(b"half")
    return broken, [path.suffix for path in left], build(folder, basic, {}, words)


def test_bad_documents_and_interrupted_builds(megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    names, pool = write_texts(tmp_path), megatron_pools[1]
    (tmp_path / "other.jsonl").write_text(json.dumps({"body": "a"}))
    (tmp_path / "empty.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("red", "", "blue")))
    (tmp_path / "no.parquet").write_text("red green")
    files = write_run_files(tmp_path / "files", hf_dir(), tmp_path)
    sizes = {"micro_batch_size": 1, "global_batch_size": 2, "seq_length": LENGTH, "train_iters": 1, "mm_data": None}
    words = launch_flags(files, **sizes)

    def refusal(dataset: str, words: list[str] = words, corpus: Any = None, **basic: Any) -> str:
        (found,) = pool.run(build, str(tmp_path), {"dataset": dataset, **basic}, corpus or {}, words)
        assert isinstance(found, str), found
        return found

    missing = refusal("other.jsonl")
    assert "other.jsonl, line 1" in missing and "'text'" in missing and "body" in missing
    assert refusal("empty.jsonl").endswith("empty.jsonl, line 2 (row 2): the text is empty; expected a document")
    assert "no.parquet: this is no parquet file: it begins with" in refusal("no.parquet")
    few = refusal("empty.jsonl", on_bad_sample="skip")
    assert "the 2 document(s) of 2 for training have" in few and f"more than the {LENGTH} of a row" in few
    assert "data file not found" in refusal("a.parqet") and "did you mean 'a.parquet'" in refusal("a.parqet")
    for suffix in (".idx", ".bin"):
        (tmp_path / f"own{suffix}").write_bytes(b"MMIDIDX")
    for name in ("own", "own.idx", "own.bin"):
        assert f"{name}: " in refusal(name) and "own.bin and .idx hold tokens" in refusal(name)
    assert "the shares add up to 99" in refusal(names, corpus={"split": "90,5,4"})
    assert "--seq-length, or cutoff_len" in refusal(names, launch_flags(files, **{**sizes, "seq_length": None}))
    ((broken, left, rows),) = pool.run(broken_and_again, str(tmp_path), words)
    assert (broken, left) == ("interrupted", [".lock"]) and len(rows) >= 2
    assert not list((tmp_path / "index").glob("*.tmp"))
    (several,) = pool.run(build, str(tmp_path), {"dataset": names, "preprocessing_num_workers": 2}, {}, words)
    assert several == rows


def test_the_door_of_train_fsdp2(megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """As in the published example for pretraining, by epochs: the loss falls, and the run resumes where it stopped."""
    write_texts(tmp_path)
    content = {
        "model": {"model_name_or_path": str(hf_dir())},
        "parallel": {"fsdp_modules": ["model.layers.{*}"], "param_dtype": "fp32"},
        "data": {
            "dataset": [str(tmp_path / name) for name in ("a.parquet", "b.jsonl", "c.txt")],
            "template": "gpt",
            "cutoff_len": LENGTH,
            "max_samples": 100000,
            "overwrite_cache": True,
            "preprocessing_num_workers": 1,
            "data_manager_type": "mg",
        },
        "training": {
            "output_dir": str(tmp_path / "whole"),
            "lr": 1e-3,
            "num_train_epochs": 3,
            "save_hf_weights": False,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    words, pool = [str(tmp_path / "run.yaml"), "--distributed-backend", "gloo"], megatron_pools[2]
    pool.run(run_entry, words, "train_fsdp2.py", timeout=120)
    losses, _ = metrics_of(tmp_path / "whole")
    assert len(losses) > 3 and losses[-1] < losses[0]
    halves = [words[0], f"training.output_dir={tmp_path / 'half'}", "training.save_steps=2", *words[1:]]
    pool.run(run_entry, [*halves, "--exit-interval", "2"], "train_fsdp2.py", timeout=120)
    again = [*halves[:2], f"training.resume_from_checkpoint={tmp_path / 'half'}", *halves[2:]]
    one = ["training.gradient_accumulation_steps=2"]  # the same global batch on one process
    megatron_pools[1].run(run_entry, [again[0], *one, *again[1:]], "train_fsdp2.py", timeout=120)
    assert metrics_of(tmp_path / "half")[0] == pytest.approx(losses, rel=1e-6)
