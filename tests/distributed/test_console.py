"""What a run on two ranks shows, and that all of them log the steps that one asks for."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from unittest import mock

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.launch import WRAP_TEXT, launch_flags, run_entry, write_run_files
from tests.support.tiny import write_mixed_dataset
from tests.support.workers import RankPool


def printed(words: list[str], silence: float) -> str:
    """Run, with another time without a line after which one is due; returns what is printed."""
    with (
        mock.patch("mindspeed_mm.monitor.console.short.SILENCE", silence),
        contextlib.redirect_stdout(io.StringIO()) as output,
    ):
        run_entry(words)
    return output.getvalue()


def test_the_first_rank_asks_and_all_log(ranks2: RankPool, qwen3_dir: Path, tmp_path: Path) -> None:
    """It alone prints, header and summary too; metrics.jsonl, which the last rank writes, has the same steps."""
    data = write_mixed_dataset(tmp_path / "data", rows=12, seed=1, images=False)
    files = write_run_files(tmp_path, qwen3_dir, data, fsdp2={"sub_modules_to_wrap": WRAP_TEXT})
    run = tmp_path / "run"
    flags = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 13, "log_interval": None}
    words = launch_flags(files, **flags, save=run, log_format="short")
    first, second = ranks2.run(printed, words, 0.0, timeout=120)
    assert second == ""
    shown = [int(line.partition("/")[0]) for line in first.splitlines() if line.lstrip()[:1].isdigit()]
    logged = [record["iteration"] for record in read_metrics(run / "metrics.jsonl")]
    assert shown == logged == [*range(1, 14)]  # the eleventh and twelfth step are logged on request only
    header, summary = first.splitlines()[:3], first.splitlines()[-4:]
    assert header[0].startswith("model       Qwen3ForCausalLM, ") and header[0].endswith(" parameters, all trained")
    assert header[1:] == [
        "devices     2 processes on the CPU",
        "layout      FSDP2, data parallel 2, weights sharded over 2",
    ]
    assert summary[-1] == f"try it      mindspeed-mm chat {run}"
    assert max(map(len, first.splitlines())) <= 120
