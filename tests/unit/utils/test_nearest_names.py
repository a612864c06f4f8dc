"""Hints: a name that was meant is offered, and no hint is better than a wrong one."""

from __future__ import annotations

import pytest

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.data.conversation.turns import missing_column
from mindspeed_mm.utils.errors import did_you_mean, nearest_names

GOOD = [
    ("train.jsn", "train.json"), ("trian.json", "train.json"), ("--micro-batch-sise", "--micro-batch-size"),
    ("num_workerz", "num_workers"), ("conversation", "conversations"), ("mesages", "messages"), ("imgaes", "images"),
    ("qwen2_vl", "qwen2vl"), ("rtain", "train"), ("image", "images"), ("model.vison", "model.vision"),
    ("--save_interval", "--save-interval"), ("layers.{0-1}", "model.layers.{0-1}"),
]  # fmt: skip
BAD = [
    ("nofile.json", "toolong.json"), ("conversation", "images"), ("messages", "images"), ("prompt", "response"),
    ("a.json", "b.json"), ("--lr", "--tp"), ("rows.jsonl", "model.jsonl"), ("", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "meant"), GOOD)
def test_what_was_meant_is_offered(name: str, meant: str) -> None:
    assert nearest_names(name, [meant, "zzz"]) == [meant]


@pytest.mark.parametrize(("name", "other"), BAD)
def test_what_is_merely_alike_is_not_offered(name: str, other: str) -> None:
    assert did_you_mean(name, [other]) == ""


def test_names_in_use_are_not_offered_and_the_best_comes_first() -> None:
    assert nearest_names("image", ["images", "image_url"], used=["images"]) == ["image_url"]
    assert nearest_names("trainn", ["training", "train"]) == ["train", "training"]


def test_columns_that_attr_names_are_not_offered_for_another() -> None:
    attr = DatasetAttr(messages="messagez", system="messages")
    assert "did you mean" not in missing_column("messages", attr, ["messages"])
    assert "did you mean 'messages'?" in missing_column("messages", DatasetAttr(messages="messagez"), ["messages"])
