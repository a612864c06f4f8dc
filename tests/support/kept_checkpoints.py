"""Write the run folders in tests/fixtures/checkpoints_34dcb3b, with the code of a checkout of commit 34dcb3b.

    git worktree add --detach CHECKOUT 34dcb3b
    python tests/support/kept_checkpoints.py CHECKOUT [OUT]

Each archive is a folder that a user of that commit could have: a tiny model's directory without weights (random ones
are drawn), data, the four configuration files and `run/`, stopped after step 3 of 6. `launch.json` holds the entry
script, the number of processes, the flags, and of the same run without a stop what
`tests/distributed/test_kept_checkpoints.py` compares: the figures of its steps, and the norms of the tensors and the
JSON values in its last checkpoint.

Paths are relative to the folder, and everything that a run reads is in it, so that an archive means the same whatever
becomes of this project's own makers of tiny models.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ARCHIVES = Path(__file__).resolve().parents[1] / "fixtures" / "checkpoints_34dcb3b"
STOP, STEPS = 3, 6
FIGURES = ("loss", "grad_norm", "learning_rate", "consumed_tokens")
QUESTIONS = ("what is it", "what is left of it", "how many", "where is it")
ANSWERS = ("red", "a blue line", "two small dots and a line", "a round red dot is above it")
CAPTIONS = ("red", "a blue line", "two dots", "a red dot", "small line", "blue dots", "a line", "two red lines")
COMMON: dict[str, Any] = {
    "mm_model": "model.json",
    "mm_data": "data.json",
    "mm_tool": "tools.json",
    "train_iters": STEPS,
    "global_batch_size": 4,
    "lr": 2e-2,
    "min_lr": 1e-3,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 1,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "seed": 7,
    "num_workers": 0,
    "log_interval": 1,
    "distributed_backend": "gloo",
}
FSDP2 = {"use_torch_fsdp2": True, "fsdp2_config_path": "fsdp2.yaml", "ckpt_format": "torch_dcp"}
# name → entry script, flags; two processes each
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("pretrain_transformers.py", {**COMMON, **FSDP2, "micro_batch_size": 1}),
    "megatron": (
        "pretrain_vlm.py",
        {**COMMON, "micro_batch_size": 2, "tensor_model_parallel_size": 2, "seq_length": 128, "eval_iters": 0},
    ),
    "generation": ("pretrain_sora.py", {**COMMON, **FSDP2, "micro_batch_size": 2, "ema_decay": 0.5}),
}


def write_language_files(folder: Path, *, megatron: bool) -> None:
    """A Qwen2.5-VL of 5 thousand parameters, 10 rows with 0 to 2 pictures, and the configuration files."""
    import numpy as np
    from PIL import Image

    write_language_model(folder / "hf", dropout=0.0 if megatron else 0.1)
    rng = random.Random(1)
    rows = []
    for index in range(10):
        names = [f"{index}_{number}.png" for number in range(index % 3)]
        for name in names:
            pixels = np.random.RandomState(rng.randrange(2**31)).randint(0, 256, (8, rng.choice([8, 16]), 3))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
        question = "<image>" * len(names) + rng.choice(QUESTIONS)
        turns = [("user", question), ("assistant", rng.choice(ANSWERS))]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns], "images": names})
    write_json(folder / "rows.json", rows)
    model: dict[str, Any] = {"init_from_hf_path": "hf", "train_from_scratch": True}
    if megatron:
        model["image_encoder"] = {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}
    attr = {"images": "images", "messages": "messages", "role_tag": "role", "content_tag": "content"}
    attr |= {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system", "formatting": "sharegpt"}
    data = {
        "dataset_param": {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset": "rows.json", "dataset_dir": "."},
            "preprocess_parameters": {"model_name_or_path": "hf"},
            "attr": attr,
        },
        "dataloader_param": {
            "dataloader_mode": "sampler",
            "sampler_type": "BaseRandomBatchSampler",
            "shuffle": True,
            "drop_last": True,
            "collate_param": {"model_name": "qwen2vl", "ignore_pad_token_for_loss": True},
        },
    }
    units = ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]
    write_configuration(folder, model, data, units)


def write_language_model(folder: Path, dropout: float) -> None:
    """Configuration, tokenizer and processor; the vocabulary is the characters of the rows and Qwen's own tokens."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    from mindspeed_mm.tools import tiny_models as tiny

    letters = sorted({*"".join((*QUESTIONS, *ANSWERS, "userassistantsystem")).replace(" ", "Ġ"), "Ċ"})
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    unnamed: dict[str, Any] = {"unk_token": None, "eos_token": None, "pad_token": None}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], **unnamed)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tiny.SPECIAL_TOKENS])
    if len(tokenizer) % 2:
        tokenizer.add_tokens(["<spare>"])  # two tensor-parallel ranks
    tokenizer.eos_token, tokenizer.pad_token = tiny.END_OF_TURN, tiny.PAD_TOKEN
    tokenizer.chat_template = tiny.chatml_template(None)
    tokenizer.save_pretrained(folder)
    tiny.build_qwen2_5_vl_processor(tokenizer, folder, min_pixels=64, max_pixels=256)
    processor = json.loads((folder / "processor_config.json").read_text())
    for kind in ("image_processor", "video_processor"):
        processor[kind]["patch_size"] = 4
    write_json(folder / "processor_config.json", processor)
    text = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0]}
    text |= {"attention_dropout": dropout, "rope_parameters": rope, "initializer_range": 0.2}
    vision = {"hidden_size": 8, "intermediate_size": 8, "patch_size": 4, "window_size": 16, "initializer_range": 0.2}
    tiny.save_model_dir(tiny.qwen2_5_vl_config(tokenizer, text=text, vision=vision), tokenizer, folder, None)


def write_generation_files(folder: Path) -> None:
    """A Wan transformer over the pixels of 8 pictures, its text encoder, and the configuration files."""
    import numpy as np
    import torch
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    words = sorted({word for caption in CAPTIONS for word in caption.split()})
    vocabulary = {word: number for number, word in enumerate(("<pad>", "</s>", "<unk>", *words))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=8
    ).save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    text = UMT5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, pad_token_id=0)
    UMT5EncoderModel(text).save_pretrained(folder / "text_encoder")
    lines = []
    for index, caption in enumerate(CAPTIONS):
        pixels = np.random.RandomState(index).randint(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        lines.append(json.dumps({"path": f"{index}.png", "cap": caption}) + "\n")
    (folder / "captions.jsonl").write_text("".join(lines))
    config = {
        "patch_size": [1, 2, 2],
        "num_attention_heads": 1,
        "attention_head_dim": 6,
        "in_channels": 3,
        "out_channels": 3,
        "text_dim": 8,
        "freq_dim": 8,
        "ffn_dim": 8,
        "num_layers": 2,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 16,
    }
    model = {
        "task": "t2v",
        "ae": {"model_id": "pixel"},
        "text_encoder": {
            "from_pretrained": "text_encoder",
            "tokenizer": "tokenizer",
            "dtype": "fp32",
            "max_length": 8,
            "ucg_rate": 0.2,
        },
        "predictor": {"model_id": "wan", "config": config, "train_from_scratch": True},
        "diffusion": {
            "model_id": "flow_matching",
            "shift": 3.0,
            "sampling": "logit_normal",
            "weighting": "uniform",
        },
    }
    data = {
        "dataset_param": {
            "dataset_type": "t2i",
            "basic_parameters": {"data_path": "captions.jsonl", "data_folder": "."},
            "preprocess_parameters": {"num_frames": 1, "max_height": 8, "max_width": 8},
        },
        "dataloader_param": {"shuffle": True, "drop_last": True},
    }
    write_configuration(folder, model, data, ["predictor.blocks.{*}"])


def write_configuration(folder: Path, model: dict[str, Any], data: dict[str, Any], units: list[str]) -> None:
    write_json(folder / "model.json", model)
    write_json(folder / "data.json", data)
    write_json(folder / "tools.json", {})
    write_json(folder / "fsdp2.yaml", {"sharding_size": "auto", "sub_modules_to_wrap": units})


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))


def words_of(flags: dict[str, Any]) -> list[str]:
    """The words of a launch command; True is a bare flag."""
    words: list[str] = []
    for name, value in flags.items():
        words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return words


def train(folder: Path, checkout: Path, name: str, **flags: Any) -> dict[str, list[float]]:
    """Launch a run in `folder`; the figures of its steps."""
    script, settings = RUNS[name]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = words_of({**settings, **flags})
    subprocess.run([*torchrun, str(checkout / script), *words], cwd=folder, env=environment, check=True)
    lines = (folder / flags["save"] / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    return {figure: [record[figure] for record in steps] for figure in FIGURES}


def contents(checkpoint: Path) -> dict[str, Any]:
    """The norm of each tensor in a checkpoint, and the values of its state.json that have no paths in them."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, Path(folder) / "tensors.pt")
        tensors = torch.load(Path(folder) / "tensors.pt", weights_only=True)
    state = json.loads((checkpoint / "state.json").read_text())
    state.pop("source")
    return {"norms": {name: float(value.double().norm()) for name, value in tensors.items()}, "state": state}


def kernels() -> str:
    """What decides how torch rounds the sums of a matrix product on this machine."""
    import torch

    return f"torch {torch.__version__.partition('+')[0]}, {torch.backends.cpu.get_cpu_capability()}"


def write_archive(name: str, checkout: Path, out: Path) -> None:
    """Train with and without a stop, check that going on equals never stopping, and pack the stopped run's folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    if name == "generation":
        write_generation_files(folder)
    else:
        write_language_files(folder, megatron=name == "megatron")
    unbroken = train(folder, checkout, name, save="unbroken")
    stopped = train(folder, checkout, name, save="run", exit_interval=STOP)
    assert len(unbroken["loss"]) == STEPS
    assert stopped == {figure: values[:STOP] for figure, values in unbroken.items()}
    shutil.copytree(folder / "run", folder / "again")
    assert train(folder, checkout, name, save="again", load="again") == unbroken
    launch = {
        "script": RUNS[name][0],
        "processes": 2,
        "flags": words_of(RUNS[name][1]),
        "kernels": kernels(),
        "unbroken": unbroken,
        "end": contents(folder / "unbroken" / f"iter_{STEPS:07d}"),
    }
    write_json(folder / "launch.json", launch)
    for made in ("unbroken", "again"):
        shutil.rmtree(folder / made)
    archive = out / f"{name}.tar.xz"
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            packed.add(file, str(file.relative_to(folder)), filter=_anonymous)
    shutil.rmtree(folder)
    print(f"{archive}: {archive.stat().st_size} bytes")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="working tree of the commit that is to write")
    parser.add_argument("out", type=Path, nargs="?", default=ARCHIVES, help="where archives go")
    parser.add_argument("--only", choices=sorted(RUNS), help="one archive only")
    args = parser.parse_args()
    sys.path.insert(0, str(args.checkout.resolve()))
    for name in [args.only] if args.only else RUNS:
        write_archive(name, args.checkout.resolve(), args.out.resolve())


if __name__ == "__main__":
    main()
