"""Runs of train_fsdp2.py: the published GPT-OSS file, the same run through every door, and plain transformers."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.run import Run
from mindspeed_mm.monitor.metrics import read_metrics
from mindspeed_mm.tasks.train.language import TRANSFORMERS
from tests.support.families import gpt_oss
from tests.support.launch import ROOT, metrics_of, run_entry
from tests.support.reference import train_reference
from tests.support.tiny import tiny_qwen3_dir
from tests.support.workers import RankPool

GPT_OSS = ROOT / "examples/fsdp2/gpt_oss"
FILE = GPT_OSS / "tune_gpt_oss_20b_a3b_4K_fsdp2.yaml"
LAYERS = ["model.layers.{*}"]


def gpt_oss_words(folder: Path, rows: Sequence[dict[str, str]], **sizes: int) -> list[str]:
    """A tiny GPT-OSS directory and a registry of data sets in a folder; the paths of the published file to them."""
    made = gpt_oss.make(folder / "hf", **sizes)
    (folder / "rows.json").write_text(json.dumps(list(rows)))
    (folder / "dataset_info.json").write_text(json.dumps({"alpaca_full": {"file_name": "./rows.json"}}))
    paths = {"model.model_name_or_path": made, "data.dataset_dir": folder, "training.output_dir": folder / "out"}
    return [*(f"{key}={path}" for key, path in paths.items()), "parallel.fsdp_size=2"]


def test_the_published_file_trains(ranks2: RankPool, tmp_path: Path) -> None:
    rows = [{"instruction": f"say {word}", "input": "", "output": word} for word in ("red", "green", "blue", "small")]
    words = [str(FILE), *gpt_oss_words(tmp_path, rows), "training.max_steps=3", "training.dataloader_num_workers=0"]
    ranks2.run(run_entry, words, "train_fsdp2.py")
    steps = [r for r in read_metrics(tmp_path / "out/metrics.jsonl") if "loss" in r]
    assert [(r["iteration"], r["consumed_samples"]) for r in steps] == [(1, 2), (2, 4), (3, 6)]
    assert steps[2]["loss"] < steps[0]["loss"]  # the first rows again
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out/hf")
    assert type(exported).__name__ == "GptOssForCausalLM"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_published_script_teaches_an_answer(tmp_path: Path) -> None:
    """As it is, but for paths, `fsdp_size` and the number of processes."""
    rows = [{"instruction": "which picture?", "input": "", "output": "the red square"}] * 320
    words = gpt_oss_words(tmp_path, rows, hidden_size=384)  # at 1e-5 a wide model learns in fewer steps
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "NPUS_PER_NODE": "2", "MASTER_PORT": port, "VIRTUAL_ENV": str(Path(sys.prefix))}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = GPT_OSS / "tune_gpt_oss_20b_a3b_4K_fsdp2_mindspeed.sh"
    done = subprocess.run(["bash", str(script), *words], env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    losses, _ = metrics_of(tmp_path / "out")
    assert len(losses) == 480 and losses[-1] < 0.5 * losses[0]
    assert answer_of(tmp_path / "out/hf", "which picture?") == "the red square"


def answer_of(hf_dir: Path, question: str) -> str:
    """The greedy answer of plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(hf_dir), AutoModelForCausalLM.from_pretrained(hf_dir)
    prompt = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True).removeprefix("final").strip()


# One run, through every door.

ALPACA = [
    {"instruction": "say the colour", "input": "red green", "output": "red"},
    {"instruction": "what is there", "input": "", "output": "a small square digit"},
    {"instruction": "where is it", "input": "left or right", "output": "it is on the left"},
    {"instruction": "how many", "input": "", "output": "seven"},
]


def door_files(folder: Path, hf_dir: Path) -> dict[str, list[str]]:
    """A door → the words of the launch, with the run folder left to the end."""
    (folder / "rows.json").write_text(json.dumps(ALPACA))
    entry = {"file_name": str(folder / "rows.json"), "formatting": "alpaca"}
    model = {"init_from_hf_path": str(hf_dir), "loss_cfg": {"loss_type": "default"}}
    fsdp2 = {"sharding_size": 1, "sub_modules_to_wrap": LAYERS, "recompute_modules": LAYERS, "reduce_dtype": "fp32"}
    fsdp2 |= {"num_to_forward_prefetch": 1}
    loader = {"shuffle": True, "drop_last": False, "pin_memory": True, "persistent_workers": False}
    data = {
        "dataset_param": {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset": [entry], "dataset_dir": "./configs/fsdp2/data"},
            "preprocess_parameters": {"model_name_or_path": str(hf_dir)},
        },
        "dataloader_param": loader,
    }
    flags: dict[str, Any] = {
        "use_torch_fsdp2": True,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "seq_length": 2048,
        "train_iters": 3,
        "lr": 1e-3,
        "min_lr": 1e-6,
        "lr_decay_style": "cosine",
        "lr_warmup_fraction": 0.1,
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "seed": 42,
        "num_workers": 0,
        "log_interval": 1,
        "save_interval": 500,
        "save_epochs": 1,
        "save_total_limit": 3,
        "expert_model_parallel_size": 1,
    }
    for name, content in (("model.json", model), ("data.json", data)):
        (folder / name).write_text(json.dumps(content))
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(fsdp2))
    files = {"mm_model": "model.json", "mm_data": "data.json", "fsdp2_config_path": "fsdp2.yaml"}
    words = [
        word
        for name, value in (flags | {name: folder / file for name, file in files.items()}).items()
        for word in ("--" + name.replace("_", "-"), *([] if value is True else [str(value)]))
    ]
    gpt_args = {"gpt_args": flags, "model": model, "data": data, "fsdp2": fsdp2}
    (folder / "gpt_args.yaml").write_text(yaml.safe_dump(gpt_args))
    own = {
        "model": {"model_name_or_path": str(hf_dir)},
        "parallel": {"fsdp_modules": LAYERS, "recompute": True, "param_dtype": "fp32"},
        "data": {"dataset": entry},
        "training": {
            "output_dir": "unused",
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 3,
            "lr": 1e-3,
            "warmup_ratio": 0.1,
        },
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(own))
    return {
        "pretrain_transformers.py": [*words, "--save-hf"],
        "pretrain_vlm.py": [str(folder / "gpt_args.yaml"), "--save-hf"],
        "train_fsdp2.py": [str(folder / "own.yaml")],
    }


def without_origin(run: Run) -> dict[str, Any]:
    """A run's description but for the files that it was read from."""
    typed = {
        name: section.model_dump() for name in ("model", "data", "fsdp2", "tools") if (section := getattr(run, name))
    }
    rest = {name: value for name, value in vars(run).items() if name not in (*typed, "files", "parallel", "given")}
    parallel = {name: value for name, value in vars(run.parallel).items() if name != "fsdp2_config_path"}
    return typed | rest | {"parallel": parallel}


def test_the_same_run_through_every_door(qwen3_dir: Path, ranks1: RankPool, tmp_path: Path) -> None:
    doors = door_files(tmp_path, qwen3_dir)
    described = [without_origin(describe([*words, "--save", "run"], TRANSFORMERS)) for words in doors.values()]
    assert described[0] == described[1] == described[2]
    figures = []
    for script, words in doors.items():
        folder = tmp_path / Path(script).stem
        ranks1.run(run_entry, [*words, "--save", str(folder)], script)
        figures.append(metrics_of(folder))
    assert len(figures[0][0]) == 3 and figures[0] == figures[1] == figures[2]


# Against plain transformers.

TEMPLATE = """{%- if tools -%}
{{- '<|im_start|>system\\ntools:' -}}{%- for tool in tools -%}{{- ' ' + (tool | tojson) -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content -%}{{- message.content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
TOOL = {"name": "look", "description": "look there", "parameters": {"type": "object", "properties": {}}}
STEPS = 3


def call(place: str) -> dict[str, Any]:
    return {"name": "look", "arguments": {"where": place}}


def sharegpt_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, word in enumerate(("red", "green", "blue", "large", "round", "square")):
        turns = [{"from": "human", "value": f"what is the {word} digit"}]
        if number % 2:
            turns += [
                {"from": "function_call", "value": json.dumps(call(word))},
                {"from": "observation", "value": f"it shows {word} seven"},
            ]
        turns.append({"from": "gpt", "value": f"the {word} answer is seven" + " two" * number})
        rows.append({"conversations": turns, "tools": json.dumps([TOOL]) if number % 2 else ""})
    return rows


def as_messages(row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """A row in the words of a chat template: messages and tools."""
    if "instruction" in row:
        asked = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}], None
    messages: list[dict[str, Any]] = []
    for turn in row["conversations"]:
        if turn["from"] == "function_call":
            calls = [{"type": "function", "function": json.loads(turn["value"])}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        else:
            role = {"human": "user", "gpt": "assistant", "observation": "tool"}[turn["from"]]
            messages.append({"role": role, "content": turn["value"]})
    return messages, json.loads(row["tools"]) if row["tools"] else None


@functools.cache
def directory() -> Path:
    """A text model whose chat template knows tools."""
    from transformers import AutoTokenizer

    made = tiny_qwen3_dir(Path(tempfile.mkdtemp(prefix="llm-fsdp2-")) / "hf", seed=3, tie=False)
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    return made


def inputs_of(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A row alone, through the tokenizer; targets are what the assistant says, with the token that ends it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory())
    messages, tools = as_messages(row)
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    ids, labels = [], []
    for part in text.split("<|im_start|>")[1:]:
        head, _, body = part.partition("\n")
        said, end, rest = body.partition("<|im_end|>")
        for piece, is_target in (
            ("<|im_start|>" + head + "\n", False),
            (said + end, head == "assistant"),
            (rest, False),
        ):
            tokens = tokenizer(piece, add_special_tokens=False).input_ids
            ids += tokens
            labels += tokens if is_target else [-100] * len(tokens)
    assert ids == tokenizer(text, add_special_tokens=False).input_ids
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}


def rows_by_step(folder: Path) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for file in (folder / "rows").iterdir():
        for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            found.setdefault(line["iteration"], []).extend(line["rows"])
    return [sorted(found[step]) for step in sorted(found)]


IN_THE_SUITE = ("sharegpt", 2, True)
CASES = [(form, ranks, packed) for form in ("alpaca", "sharegpt") for ranks in (1, 2) for packed in (False, True)]


@pytest.mark.parametrize(
    ("form", "ranks", "packed"),
    [pytest.param(*case, marks=() if case == IN_THE_SUITE else pytest.mark.full) for case in CASES],
)
def test_it_equals_plain_transformers(
    form: str, ranks: int, packed: bool, ranks1: RankPool, ranks2: RankPool, tmp_path: Path
) -> None:
    rows = [*ALPACA, *ALPACA[:2]] if form == "alpaca" else sharegpt_rows()
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    content = {
        "model": {"model_name_or_path": str(directory())},
        "parallel": {"fsdp_size": ranks, "fsdp_modules": LAYERS, "param_dtype": "fp32"},
        "data": {
            "dataset": {"file_name": str(tmp_path / "rows.json"), "formatting": form, "columns": columns_of(form)},
            "cutoff_len": 192,
            "neat_packing": packed,
        },
        "training": {
            "output_dir": str(tmp_path / "out"),
            "max_steps": STEPS,
            "gradient_accumulation_steps": 2 // ranks,
            "lr": 1e-3,
            "lr_scheduler_type": "constant",
            "weight_decay": 0.1,
            "calculate_per_token_loss": True,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    pool = ranks1 if ranks == 1 else ranks2
    pool.run(run_entry, [str(tmp_path / "run.yaml"), "--log-row-ids"], "train_fsdp2.py")
    steps = rows_by_step(tmp_path / "out")
    assert (len(steps) == STEPS and max(map(len, steps)) > 2) or not packed
    losses, norms, _ = train_reference(directory(), [inputs_of(row) for row in rows], STEPS, rows_of=steps.__getitem__)
    found_losses, found_norms = metrics_of(tmp_path / "out")
    assert found_losses == pytest.approx(losses, rel=1e-6)
    assert found_norms == pytest.approx(norms, rel=1e-5)


def columns_of(form: str) -> dict[str, str]:
    """Columns of an entry: those of alpaca by its own names."""
    return {"messages": "conversations", "tools": "tools"} if form == "sharegpt" else {}
