"""Compare the adapters of a run with PEFT, merge them, and add the figures before and after tuning to `report.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from mindspeed_mm.checkpoint.tensors import model_tensors
from mindspeed_mm.configs.lora import LoraOptions
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.transformers_model import TransformersModel

ROWS = 16
PREFIX = "base_model.model."


def main() -> None:
    """Print and write the figures; exit with status 1 if logits or merged weights differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder with hf/, a PEFT directory")
    parser.add_argument("--base", type=Path, required=True, help="run folder of the base model")
    parser.add_argument("--data", type=Path, required=True, help="folder of heldout.json")
    options = parser.parse_args()
    run, base = options.run, options.base / "hf"
    inputs = inputs_of(base, options.data)
    plain = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    weights = {name: weight.clone() for name, weight in plain.state_dict().items()}
    tuned = PeftModel.from_pretrained(plain, run / "hf").eval()
    with torch.inference_mode():
        expected = tuned(**inputs).logits
        found = {"our model": our_model(base, run)(**inputs).logits}
    tuned.merge_and_unload().save_pretrained(run / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(run / "merged").eval()
    with torch.inference_mode():
        found["the merged model"] = merged(**inputs).logits
    adapters = load_file(run / "hf/adapter_model.safetensors")
    differ = {name: difference(logits, expected) for name, logits in found.items()}
    differ["merged weights"] = merge_difference(adapters, weights, merged.state_dict(), run)
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    before = json.loads((options.base / "report.json").read_text(encoding="utf-8"))
    share = sum(map(torch.numel, adapters.values())) / sum(map(torch.numel, weights.values()))
    report |= {"heldout_accuracy_before": before["heldout_accuracy"], "trained_share": round(share, 4)}
    (run / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for name, value in differ.items():
        print(f"{name}: relative difference {value:.1e}")
    print(
        f"held-out accuracy {before['heldout_accuracy']:.4f} before LoRA, {report['heldout_accuracy']:.4f} after; "
        f"{share:.2%} of the parameters trained"
    )
    if max(differ.values()) > 1e-5 or differ["merged weights"] > 1e-6:
        raise SystemExit("the adapters mean something else to PEFT")


def inputs_of(model_dir: Path, data: Path) -> dict[str, torch.Tensor]:
    """Return held-out questions with their answers as the model takes them."""
    rows = json.loads((data / "heldout.json").read_text(encoding="utf-8"))[:ROWS]
    processor = AutoProcessor.from_pretrained(model_dir)
    texts = []
    for row in rows:
        question, answer = row["messages"]
        parts = [{"type": "image"}, {"type": "text", "text": question["content"].replace("<image>", "")}]
        texts.append(processor.apply_chat_template([{"role": "user", "content": parts}, answer], tokenize=False))
    images = [Image.open(data / row["images"][0]).convert("RGB") for row in rows]
    return dict(processor(text=texts, images=images, padding=True, return_tensors="pt"))


def our_model(base: Path, run: Path) -> TransformersModel:
    """Return the model as it is trained, filled from the run's last checkpoint, which holds its adapters only."""
    step = int((run / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))
    config = json.loads((run / "hf/adapter_config.json").read_text(encoding="utf-8"))
    lora = LoraOptions(tuple(config["target_modules"]), r=config["r"], alpha=config["lora_alpha"])
    with build_context(BuildContext(lora=lora)):
        model = TransformersModel({"init_from_hf_path": str(base)})
    dcp.load(model_tensors(model.model), checkpoint_id=run / f"iter_{step:07d}", no_dist=True)
    return model.eval()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def merge_difference(adapters: dict[str, Any], base: dict[str, Any], merged: dict[str, Any], run: Path) -> float:
    """Return how far merged weights are from W + alpha / r * B A, computed in float64, relative to the largest."""
    config = json.loads((run / "hf/adapter_config.json").read_text(encoding="utf-8"))
    scaling = config["lora_alpha"] / config["r"]
    differ = []
    for name, weight in base.items():
        path = PREFIX + name.removesuffix(".weight")
        expected = weight.double()
        if f"{path}.lora_A.weight" in adapters:
            a, b = (adapters[f"{path}.lora_{half}.weight"].double() for half in "AB")
            expected = expected + scaling * b @ a
        differ.append(difference(merged[name], expected))
    return max(differ)


if __name__ == "__main__":
    main()
