"""The file of train_fsdp2.py: model, parallel, data, training and features."""

from __future__ import annotations

from mindspeed_mm.configs.yaml_run import Dialect

DIALECT = Dialect(frozenset({"parallel", "training", "features"}), "train_fsdp2.py", None)
