"""Records of a run's steps."""

from __future__ import annotations

from typing import Any

from mindspeed_mm.monitor.records import StepRecord


def step_record(**changes: Any) -> StepRecord:
    """Return the record of step 7 of 100, with other values for some of its figures."""
    figures: dict[str, Any] = {
        "iteration": 7,
        "train_iters": 100,
        "consumed_samples": 224,
        "step_ms": 1234.56,
        "learning_rate": 1e-5,
        "global_batch_size": 32,
        "loss": 2.5,
        "grad_norm": 1.25,
        "skipped_iterations": 1,
        "tokens_per_second": 1000.0,
        "eta_seconds": 3700.0,
        "media_per_second": {"image": 2.0, "video": 0.5},
        "data_wait_ms": 12.5,
        "data_wait_fraction": 0.01,
        "imbalance": 1.25,
        "rows_left_out": 3,
        "padding_fraction": 0.25,
        "memory_bytes": 2**30,
    }
    return StepRecord(**{**figures, **changes})
