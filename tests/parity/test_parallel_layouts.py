"""Context, expert and tensor parallelism under FSDP2: each layout trains what one process and plain transformers train.

The real entry scripts run in the workers, on flags and files as a user writes them, fp32: three SGD steps on rows of
all media and of none, padded and packed. Losses (also those of routers and of validation rows), norms, every gradient,
and the weights after the last step are compared with a hand-written loop and with the same script in one process; what
is counted equals that of one process. The suite runs `SUBSET`, and `-m full` the whole table.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.dry_run import outline_of
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from mindspeed_mm.utils.errors import ConfigError
from tests.support.parallel_case import FORMS, ParallelCase, differences
from tests.support.parallel_models import LAYOUTS, MODELS

Row = tuple[str, str, str]
#: each layout of context, expert and tensor parallelism once, and each model, in one form: its references are made once
SUBSET: list[Row] = [
    ("qwen2_5_vl", "CP2 Ulysses", "packed"),
    ("gpt_oss", "CP2 ring", "padded"),
    ("gpt_oss", "CP4 Ulysses", "padded"),
    ("qwen3", "CP4 ring", "packed"),
    ("qwen3_vl", "CP4 ring 2 x Ulysses 2", "padded"),
    ("qwen3_moe", "CP2 Ulysses, DP2", "packed"),
    ("deepseek_v3", "CP2 ring, DP2, sharded over 2", "padded"),
    ("qwen3_vl_moe", "EP2", "padded"),
    ("qwen3_moe", "EP4", "packed"),
    ("gpt_oss", "EP2 x FSDP2", "padded"),
    ("deepseek_v3", "EP2, 2 copies", "padded"),
    ("gpt_oss", "TP2", "padded"),
    ("qwen3", "TP2 SP", "packed"),
    ("qwen3", "TP2 x FSDP2", "packed"),
    ("qwen3_moe", "TP2 SP x FSDP2", "packed"),
    ("qwen3", "TP2, CP2 Ulysses", "packed"),
    ("internvl", "TP2, CP2 ring", "packed"),
    ("qwen3_moe", "TP2, EP2", "packed"),
    ("glm4v_moe", "CP2 Ulysses, EP2", "packed"),
    ("qwen3_omni_moe", "CP2 ring, EP2 x FSDP2", "padded"),
    ("gpt_oss", "CP2 Ulysses, TP2, EP2", "padded"),
    ("qwen3_moe", "CP2 Ulysses, TP2, EP4", "packed"),
]


def is_in_table(row: Row) -> bool:
    """Whether a model trains in a layout; layouts of four ranks, which are slow on two cores, in one form in turn."""
    name, layout, form = row
    if MODELS[name].refusal(LAYOUTS[layout]) is not None:
        return False
    turn = list(MODELS).index(name) + list(LAYOUTS).index(layout)
    return LAYOUTS[layout].world < 4 or form == FORMS[turn % 2]


#: (model, layout, form of the rows)
TABLE: list[Row] = [row for row in itertools.product(MODELS, LAYOUTS, FORMS) if row in SUBSET or is_in_table(row)]


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="parallel-layouts-"))


@pytest.fixture(scope="session")
def cases(pools: dict[int, Any]) -> Any:
    """Model → its case."""
    return functools.cache(lambda name: ParallelCase(name, MODELS[name], workspace() / name, pools))


def assert_equal(case: ParallelCase, name: str, layout: str, form: str, folder: Path) -> None:
    found = case.run(LAYOUTS[layout], form, folder / "case")
    shutil.rmtree(folder / "case")
    alone, plain = case.alone(form), case.plain(form)
    from_plain, from_alone = differences(found, plain), differences(found, alone)
    if "MM_PARITY_RECORDS" in os.environ:  # what scripts/make_parallelism_table.py makes the documentation's table of
        record = {"table": "fsdp2", "model": name, "layout": layout, "rows": form, **asdict(from_plain)}
        with open(os.environ["MM_PARITY_RECORDS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    assert from_plain.problems() == []
    assert from_alone.problems() == []
    assert found.rows == alone.rows and found.counts == alone.counts


def test_the_subset_has_every_layout_and_model() -> None:
    assert {layout for _, layout, _ in SUBSET} == {name for name, layout in LAYOUTS.items() if layout.kinds}
    assert {model for model, *_ in SUBSET} == set(MODELS) and set(SUBSET) <= set(TABLE)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, model in MODELS.items() for kind in model.refused])
def test_refused_before_processes_start(
    name: str, kind: str, cases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the documentation's table shows as refused."""
    for variable, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    layout = LAYOUTS[{"experts": "EP2", "tensor": "TP2"}[kind]]
    words = cases(name).words(layout, "padded", tmp_path)
    with pytest.raises(ConfigError, match=MODELS[name].refused[kind]):
        outline_of(describe(words, TRANSFORMERS), TRANSFORMERS)


@pytest.mark.parametrize(("name", "layout", "form"), SUBSET)
def test_layout(name: str, layout: str, form: str, cases: Any, tmp_path: Path) -> None:
    assert_equal(cases(name), name, layout, form, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout", "form"), [row for row in TABLE if row not in SUBSET])
def test_rest_of_the_table(name: str, layout: str, form: str, cases: Any, tmp_path: Path) -> None:
    assert_equal(cases(name), name, layout, form, tmp_path)
