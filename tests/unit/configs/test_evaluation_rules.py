"""Validation rows that --save-best, --early-stop and --eval-generate need, by the files of each kind of run."""

from __future__ import annotations

import json
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.eval_metrics import DEFAULT_METRIC, EVAL_METRICS, METRIC_SYNONYMS, AnswerScoreName, MetricName
from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.tasks.evaluation.scores import SCORES
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from mindspeed_mm.utils.errors import ConfigError

WORDS = "--mm-model model.json --mm-data data.json --micro-batch-size 4 --lr 1e-3 --use-torch-fsdp2 --train-iters 9"


def test_every_name_has_its_entry() -> None:
    scores = {name: score.higher_is_better for name, score in SCORES.items()}
    assert scores == {name: EVAL_METRICS[name].higher_is_better for name in typing.get_args(AnswerScoreName)}
    assert {"loss", *scores} == EVAL_METRICS.keys()
    assert set(typing.get_args(MetricName)) == EVAL_METRICS.keys() >= {DEFAULT_METRIC, *dict(METRIC_SYNONYMS).values()}


def language(basic: dict[str, Any], **param: Any) -> str | None:
    param = {"dataset_type": "huggingface", "preprocess_parameters": {"model_name_or_path": "hf"}, **param}
    content = {"dataset_param": {**param, "basic_parameters": {"dataset": "rows.json", **basic}}}
    return DataConfig.from_dict(content).dataset_param.why_no_validation


def generation(**basic: Any) -> str | None:
    param = {"dataset_type": "t2v", "basic_parameters": {"data_path": "rows.json", **basic}}
    return GenerationDataConfig.from_dict({"dataset_param": param}).dataset_param.why_no_validation


def test_which_files_have_validation_rows() -> None:
    for basic in ({"val_dataset": "held.json"}, {"val_rate": 0.1}, {"val_size": 3}):
        assert language(basic) is None
        assert "'dataset_param.basic_parameters.val_max_samples' is 0" in str(language({**basic, "val_max_samples": 0}))
    assert "has no val_dataset, val_rate or val_size" in str(language({}))
    assert "has no val_dataset, val_rate or val_size" in str(language({"val_rate": 0}))
    corpus = {"dataset_type": "corpus"}
    assert language({"cache_dir": "c"}, **corpus, corpus={"split": "90,10,0"}) is None
    assert "'dataset_param.corpus.split' is 100,0,0" in str(language({"cache_dir": "c"}, **corpus))
    assert generation(val_rate=0.1) is None and generation(val_data_path="held.json") is None
    assert "has no val_data_path or val_rate" in str(generation())


@pytest.mark.parametrize("words", ["--save run --save-best loss", "--early-stop 3", "--eval-generate anls"])
def test_a_run_without_validation_rows_is_refused(run_folder: Path, words: str) -> None:
    (run_folder / "hf" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match=rf"--{words.partition('--')[2].split('--')[-1]} needs validation rows, and"):
        describe([*WORDS.split(), *words.split()], TRANSFORMERS)
    data = json.loads((run_folder / "data.json").read_text())
    data["dataset_param"]["basic_parameters"]["val_size"] = 1
    (run_folder / "data.json").write_text(json.dumps(data))
    assert describe([*WORDS.split(), *words.split()], TRANSFORMERS).logging.eval_interval == 1000


@pytest.mark.parametrize(
    ("param", "sentence"),
    [
        ({"basic_parameters": {"stage": "pt", "val_size": 1}}, "the rows of stage pt are texts without turns"),
        ({"dataset_type": "corpus", "corpus": {"split": "90,10,0"}}, "the rows of dataset_type corpus are texts"),
    ],
)
def test_rows_without_turns_are_not_answered(run_folder: Path, param: dict[str, Any], sentence: str) -> None:
    (run_folder / "hf" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    data = json.loads((run_folder / "data.json").read_text())
    basic = {**data["dataset_param"]["basic_parameters"], "cache_dir": "c", **param.get("basic_parameters", {})}
    data["dataset_param"] |= {**param, "basic_parameters": basic}
    (run_folder / "data.json").write_text(json.dumps(data))
    words = [*WORDS.split(), "--eval-generate"]
    with pytest.raises(ConfigError, match=rf"--eval-generate exact_match: data\.json: {sentence}"):
        describe(words, TRANSFORMERS)
    with pytest.raises(ConfigError, match="--eval-generate exact_match: this script's model writes no answers"):
        describe(words, replace(TRANSFORMERS, scorer=None))
    with pytest.raises(ConfigError, match="--sample-interval 5: this script's model makes no pictures or videos"):
        describe([*WORDS.split(), "--save", "run", "--sample-interval", "5"], TRANSFORMERS)
