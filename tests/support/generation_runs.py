"""Run folders of tiny Wan models as training leaves them: checkpoints with trained and averaged weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_wan import model_json

PROMPTS = ("a cat runs", "a red dog sleeps", "blue cat")


@dataclass(frozen=True)
class TinyRun:
    """A trained model.

    Attributes:
        folder: run folder, with iteration 5.
        model_json: path of its model.json.
        trained, averaged: state dicts of the predictor.
        config: of the predictor.
        encoders: folder of the frozen parts.
    """

    folder: Path
    model_json: Path
    trained: dict[str, torch.Tensor]
    averaged: dict[str, torch.Tensor]
    config: dict[str, Any]
    encoders: Path

    def predictor(self, weights: dict[str, torch.Tensor]) -> Any:
        """diffusers' own model with some weights."""
        from diffusers import WanTransformer3DModel

        model = WanTransformer3DModel(**self.config)
        model.load_state_dict(weights)
        return model.eval()


def write_run(root: Path, encoders: Path, task: str = "t2v", *, pixel: bool = False, **changes: Any) -> TinyRun:
    """Write model.json and a run folder with random weights."""
    import torch.distributed.checkpoint as dcp
    from diffusers import WanTransformer3DModel

    content = json.loads(json.dumps(model_json(encoders, task, **changes)))
    if pixel:
        content["ae"] = {"model_id": "pixel"}
        content["predictor"]["config"] |= {"in_channels": 3, "out_channels": 3}
    root.mkdir(parents=True)
    (root / "model.json").write_text(json.dumps(content))
    config = content["predictor"]["config"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        trained = WanTransformer3DModel(**config).state_dict()
        averaged = {name: value + 0.3 * torch.randn_like(value) * value.std() for name, value in trained.items()}
    folder = root / "run"
    kept = {f"model.{name}": value for name, value in trained.items()}
    kept |= {f"ema.{name}": value for name, value in averaged.items()}
    dcp.save(kept, checkpoint_id=folder / "iter_0000005", no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return TinyRun(folder, root / "model.json", trained, averaged, config, encoders)


def write_prompts(folder: Path) -> Path:
    """Write the file of `PROMPTS`."""
    path = folder / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n\n")
    return path
