"""A user's own Megatron-core model and script on the Megatron backend: any layout, saved and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import metrics_of
from tests.support.workers import RankError, RankPool

SCRIPT = """
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Subset

import mindspeed_mm
from megatron.training import get_args
from mindspeed_mm.training import pretrain


class Rows(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"ids": torch.randint(0, 64, (17,), generator=torch.Generator().manual_seed(index))}


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = get_args()
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size, pipeline_dtype=torch.float32,
        calculate_per_token_loss=True, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
    )
    return GPTModel(
        config, get_gpt_layer_local_spec(), 64, 32, pre_process=pre_process, post_process=post_process,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )


def loss_func(losses):
    return losses.sum(), torch.tensor(float(losses.numel())), {"largest": losses.detach().max()}


def forward_step(data_iterator, model):
    ids = next(data_iterator)["ids"]
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, mask, labels=labels), loss_func


def provider(samples):
    return Rows(), Subset(Rows(), range(5)), None


if __name__ == "__main__":
    pretrain(provider, model_provider, forward_step_func=forward_step)
"""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "DP2": (2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}),
}


def run_script(script: str, words: list[str]) -> None:
    import runpy
    import sys

    before = sys.argv
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = before


def train(folder: Path, pools: dict[int, RankPool], layout: str, run: str, script: str = SCRIPT, **flags: Any) -> Path:
    file = folder / "train.py"
    file.write_text(script)
    ranks, chosen = LAYOUTS[layout]
    settings = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 4, "lr": 1e-2, "seq_length": 16}
    settings |= {"num_workers": 0, "log_interval": 1, "distributed_backend": "gloo", "save": folder / run}
    words: list[str] = []
    for name, value in {**settings, **chosen, **flags}.items():
        words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    pools[ranks].run(run_script, str(file), words, timeout=120)
    return folder / run


def test_a_users_model_goes_on_in_every_layout(megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Stages draw their own random weights, so that the layouts are compared from a checkpoint on.

    Only the model knows how the rows of a tensor-parallel parameter are ordered: without `param_mapping` that size must
    stay.
    Five rows are evaluated in two steps of four: their loss is that of the same rows in whole steps.
    """
    whole = train(tmp_path, megatron_pools, "1 process", "whole", save_interval=2)
    losses, norms = metrics_of(whole)
    assert len(losses) == 4
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(r["largest"] > r["loss"] for r in records if "loss" in r)
    with pytest.raises(
        RankError, match="saved with --tensor-model-parallel-size 1, this run has 2: without `param_mapping`"
    ):
        train(tmp_path, megatron_pools, "TP2", "TP2", load=whole, ckpt_step=2)
    evaluated = []
    for layout in ("1 process", "PP2", "DP2"):
        script = SCRIPT.replace("range(5)", "[*range(5)] * 4") if layout == "1 process" else SCRIPT
        more = {"load": whole, "ckpt_step": 2, "eval_interval": 9, "eval_iters": 9}
        run = train(tmp_path, megatron_pools, layout, layout, script=script, **more)
        found = metrics_of(run)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        evaluated += [json.loads(line)["eval_loss"] for line in lines if "eval_loss" in line]
        assert found[0] == pytest.approx(losses[2:], rel=1e-6), layout
        assert found[1] == pytest.approx(norms[2:], rel=1e-5), layout
    assert evaluated == pytest.approx([evaluated[0]] * 3, rel=1e-6)


def test_a_users_model_resumes_bit_for_bit(megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    for layout in ("TP2", "PP2", "DP2"):
        whole = train(tmp_path, megatron_pools, layout, layout, save_interval=2)
        again = train(tmp_path, megatron_pools, layout, f"{layout}_again", load=whole, ckpt_step=2)
        assert metrics_of(again) == tuple(figures[2:] for figures in metrics_of(whole)), layout


def test_a_model_that_schedules_can_not_drive_is_refused(megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    plain = SCRIPT.replace("    return GPTModel(", "    return torch.nn.Linear(2, 2)\n    return GPTModel(")
    with pytest.raises(RankError, match="Linear, which model_provider returned, has no set_input_tensor"):
        train(tmp_path, megatron_pools, "1 process", "run", script=plain)


def test_a_users_tied_embedding_starts_equal_on_both_stages(
    megatron_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """A checkpoint holds one copy: if the head's were another, a single process would go on differently."""
    tied = SCRIPT.replace("share_embeddings_and_output_weights=False", "share_embeddings_and_output_weights=True")
    whole = train(tmp_path, megatron_pools, "PP2", "whole", script=tied, save_interval=2)
    losses, norms = metrics_of(whole)
    found = metrics_of(train(tmp_path, megatron_pools, "1 process", "one", script=tied, load=whole, ckpt_step=2))
    assert found[0] == pytest.approx(losses[2:], rel=1e-6)
    assert found[1] == pytest.approx(norms[2:], rel=1e-5)
