"""`dataset_type: corpus`: rows of one length out of documents, in the order of Megatron-core's GPTDataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from mindspeed_mm.configs.arguments import resolve_train_iters
from mindspeed_mm.configs.corpus_config import CORPUS_IDLE_KEYS
from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.adapter import DataAdapter, DefaultAdapter, check_model_path
from mindspeed_mm.data.loading.corpus_index import Corpus
from mindspeed_mm.data.loading.megatron_samples import RowRequest, open_samples, require_megatron_samples
from mindspeed_mm.data.plan.plan import FILLER
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.labels import IGNORE_INDEX
from mindspeed_mm.utils.log import info_rank0, notice


class CorpusRows(Dataset):
    """Rows of a corpus.

    `dataset[i]` has `input_ids` [L] int64, `labels` [L] int64, the token after each (the last one's is the first of the
    next row), `documents` [L] int64 (1, 2, …) where documents don't see each other, `row_id` and `num_rows`. Index -1
    is a filler without targets.

    Args:
        corpus: The documents.
        samples: GPTDataset of them.
        eod: Id by which documents of a row are told apart; None: they see each other.
        rows_per_epoch: Tokens of the documents over the length of a row.
    """

    has_fillers = True

    def __init__(self, corpus: Corpus, samples: Any, eod: int | None, rows_per_epoch: float) -> None:
        self.rows_per_epoch, self.tokenizer = rows_per_epoch, corpus.tokenizer
        self._corpus, self._samples, self._eod = corpus, samples, eod

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._samples[max(index, 0)]
        ids, labels = sample["tokens"], sample["labels"].masked_fill(sample["loss_mask"] == 0, IGNORE_INDEX)
        if index == FILLER:
            labels = torch.full_like(labels, IGNORE_INDEX)
        row = {"input_ids": ids, "labels": labels}
        if self._eod is not None:
            ends = (ids == self._eod).long()
            row["documents"] = 1 + ends.cumsum(0) - ends
        return {**row, "row_id": torch.tensor(index), "num_rows": torch.tensor(int(index != FILLER))}

    def collate_fn(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """Return a micro-batch: tensors [B, L]; `labels` are already shifted, which `labels_are_shifted` says."""
        batch: dict[str, Any] = {
            key: torch.stack([sample[key] for sample in samples]) for key in ("input_ids", "labels")
        }
        if self._eod is not None:
            batch["documents"] = torch.stack([sample["documents"] for sample in samples])
        else:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        host = {
            "row_ids": torch.stack([sample["row_id"] for sample in samples]),
            "num_rows": sum(int(sample["num_rows"]) for sample in samples),
            "rows_left_out": 0,
        }
        return {**batch, **host, "labels_are_shifted": True}

    def where(self, index: int) -> str:
        """Name the documents of row `index`, for messages."""
        number = int(self._samples.shuffle_index[index])
        first, last = (int(self._samples.sample_index[place][0]) for place in (number, number + 1))
        return self._corpus.where(self._samples.document_index[first : last + 1].tolist())


def corpus_rows(run: Run, param: DatasetParam, adapter: DataAdapter | None) -> tuple[CorpusRows, CorpusRows | None]:
    """Build the rows of a run for training and validation.

    Training rows are as many as the run reads, as Megatron-core's order depends on their number; validation has those
    of one pass.

    Args:
        run: Its length, batch and seed.
        param: `dataset_param`.
        adapter: The model family; None takes the default one.

    Raises:
        ConfigError: No length of rows; megatron-core isn't installed; no tokenizer.
        DataError: Fewer tokens than a row has, or a file or document that can't be used.
    """
    basic = param.basic_parameters
    length = basic.cutoff_len if run.batch.seq_length is None else run.batch.seq_length
    if length is None:
        raise ConfigError(
            "dataset_param.dataset_type corpus: rows have one length; give --seq-length, or cutoff_len in data.json"
        )
    require_megatron_samples("dataset_param.dataset_type corpus")
    _log_idle(param)
    path = param.preprocess_parameters.model_name_or_path
    check_model_path(path)
    processor = (adapter or DefaultAdapter()).load_processor(path, param.preprocess_parameters)
    corpus = Corpus(param, getattr(processor, "tokenizer", processor))
    common = {
        "seed": run.process.seed,
        "length": length,
        "split": tuple(corpus.options.split),
        "eod": corpus.eod,
        "vocabulary": corpus.vocabulary,
        "resets": corpus.options.reset_attention_mask,
    }

    def rows(part: str, *, whole_run: bool) -> CorpusRows:
        request = RowRequest(part=part, rows=None, **common)
        documents = request.documents(len(corpus.lengths))
        tokens = int(corpus.lengths[documents].sum(dtype="int64"))
        if tokens <= length:
            raise DataError(
                f"dataset_param.corpus.split {','.join(f'{share:g}' for share in corpus.options.split)}: the "
                f"{len(documents)} document(s) of {len(corpus.lengths)} for {_PARTS[part]} have {tokens} tokens; "
                f"expected more than the {length} of a row"
            )
        per_epoch = tokens / length
        if whole_run:
            global_batch = run.batch.global_batch_size
            steps = resolve_train_iters(run.length, len(documents), per_epoch / global_batch)
            request = RowRequest(part=part, rows=steps * global_batch, **common)
        size = f"{len(documents)} documents, {tokens} tokens, {per_epoch:.1f} rows a pass"
        info_rank0(f"corpus for {_PARTS[part]}: {size}")
        eod = corpus.eod if corpus.options.reset_attention_mask else None
        return CorpusRows(corpus, open_samples(corpus.prefix, request), eod, per_epoch)

    validates = run.logging.eval_iters and run.logging.eval_interval and corpus.options.split[1]
    return rows("train", whole_run=True), rows("valid", whole_run=False) if validates else None


_PARTS = {"train": "training", "valid": "validation"}


def _log_idle(param: DatasetParam) -> None:
    basic, options = param.basic_parameters, param.corpus
    idle = [key for key in CORPUS_IDLE_KEYS if key in basic.model_fields_set]
    if given := [key for key in idle if getattr(basic, key) != type(basic).model_fields[key].default]:
        notice(f"dataset_param.basic_parameters: no effect here: {', '.join(given)}: a corpus has no turns")
    if options is None:
        return
    if options.reset_attention_mask and not options.reset_position_ids:
        notice(
            "dataset_param.corpus.reset_attention_mask: positions begin anew with each document, too; as its tokens "
            "see no others, only their distances count"
        )
    for key in ("create_attention_mask_in_dataloader", "no_shared_storage"):
        if getattr(options, key):
            why = str(type(options).model_fields[key].description).removeprefix("no effect: ")
            notice(f"dataset_param.corpus: no effect here: {key}: {why}")
    if options.split[2]:
        notice(f"dataset_param.corpus.split: the last {options.split[2]:g} of the documents, for tests, are left out")
