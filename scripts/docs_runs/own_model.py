"""docs/own_model.md, and the pages whose commands take what comes out or the same tiny directory."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

from scripts.docs_runs import converting, corpus, first_run, parallelism
from scripts.docs_runs.common import (
    CHINESE,
    OWN_MODEL,
    ROOT,
    DocumentError,
    Done,
    exchange,
    expect,
    fences,
    items,
    key,
    page_of,
    preload,
    shell,
    start,
)

HF = "ckpt/Qwen2.5-VL-7B-Instruct"
#: what the page says → what is run in its place: fewer processes, samples and steps, and the CPU's collectives
SMALLEST = {
    "--nproc_per_node 8": "--standalone --nproc_per_node 1",
    "pretrain_transformers.py": str(ROOT / "pretrain_transformers.py"),
    "--global-batch-size 64": "--global-batch-size 1",
    "--train-iters 1000": "--train-iters 2",
    "--distributed-backend nccl": "--distributed-backend gloo --num-workers 0",
    "torchrun": f"{shlex.quote(sys.executable)} -m torch.distributed.run",
}
#: words of docs/checkpoints.md's commands → what stands for them; averaged weights are those of the run of run.yaml
PLACES = {"RUN": "runs/mine", "DIR": "runs/mine", "HF": HF, "OUT": "out"}
#: flags behind docs/configuration.md's run.yaml
AFTER_YAML = (
    "--train-iters 1 --global-batch-size 1 --num-workers 0 --distributed-backend gloo --ema-decay 0.9 --save runs/yaml"
)
#: the same behind the file of train_fsdp2.py
AFTER_LLM_YAML = "parallel.fsdp_size=1 training.max_steps=1"
#: the launch that docs/migrating.md's messages answer to; each message beside the flags that lead to it
LAUNCH = (
    "python pretrain_transformers.py --use-torch-fsdp2 --mm-model model.json --mm-data data.json --train-iters 1"
    " --lr 1e-5 --micro-batch-size 1 --global-batch-size 1 --num-workers 0 --distributed-backend gloo"
)
WITHOUT_EFFECT = (
    "--num-layers 28 --hidden-size 3584 --vocab-size 152064 --use-distributed-optimizer --use-fused-rmsnorm"
)
REFUSED = {
    "'--save-intervall'": "--save-intervall 5",
    "'text_decoder.ckpt_path'": "--mm-model older/model.json",
    "'--prompts'": "--prompts prompts.txt",
}


def run() -> Done:
    """Follow the page in both languages; then convert, and start the launches of the other pages."""
    write_model()
    done: Done = set()
    for page in (CHINESE, OWN_MODEL):
        shutil.rmtree("runs", ignore_errors=True)
        done |= follow(page)
    done |= report(page_of("report.md"))
    done |= first_run.run(page_of("first_run.md"))
    done |= lora(page_of("lora.md"))
    preload(
        "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
    )
    done |= configuration(page_of("configuration.md"))
    done |= convert(page_of("checkpoints.md"))
    done |= migrating(page_of("migrating.md"))
    done |= parallelism.run(page_of("parallelism.md"))
    return done | corpus.run(page_of("data.md")) | converting.run(page_of("data.md"))


def write_model() -> None:
    """A tiny model where the pages name published ones, and the picture that the page's row names."""
    from PIL import Image

    from mindspeed_mm.tools import tiny_models

    tokenizer = tiny_models.build_byte_bpe_tokenizer(["What is this? A cat."] * 9, 320, Path(HF))
    tiny_models.build_qwen2_5_vl_processor(tokenizer, HF)
    config = tiny_models.qwen2_5_vl_config(tokenizer, text={"vocab_size": 320})  # tensor parallelism divides it
    tiny_models.save_model_dir(config, tokenizer, HF, 0)
    Path("data/images").mkdir(parents=True)
    Image.new("RGB", (56, 56), (200, 120, 40)).save("data/images/0001.png")


def follow(page: Path) -> Done:
    """Write the files of the page in this folder, train as it says, and define its class."""
    written = {}
    done = set()
    for snippet in fences(page, "json"):
        content = json.loads(snippet.text)
        name = "data.json" if "dataset_param" in content else "row" if "messages" in content else "model.json"
        written[name] = snippet.text
        done.add(key(page, snippet.text))
    (fsdp2,) = fences(page, "yaml")
    Path("data/train.json").write_text(json.dumps([json.loads(written.pop("row"))]), encoding="utf-8")
    for name, text in {**written, "fsdp2.yaml": fsdp2.text, "tools.json": "{}"}.items():
        Path(name).write_text(text, encoding="utf-8")
    (command,) = (item for snippet in fences(page, "bash") for item in items(snippet) if "model.json" in item)
    output = shell(exchange(command, SMALLEST, page), page)
    expect(output, ["done: 2 iterations", "iteration        1/       2"], page)
    for snippet in fences(page, "python"):
        exec(compile(snippet.text, snippet.place, "exec"), {"__name__": snippet.place})
        done.add(key(page, snippet.text))
    return done | {key(page, fsdp2.text), key(page, command)}


def report(page: Path) -> Done:
    """Make the report of the page's run again, and compare it with itself."""
    commands = [item for snippet in fences(page, "bash") for item in items(snippet)]
    for command in commands:
        start(command.replace("runs/other", "runs/mine"), page)
    for made in (Path("runs/mine/report.html"), Path("runs/mine/loss.png"), Path("both.html")):
        if not made.is_file():
            raise DocumentError(f"{page.name}: there is no {made}")
    return {key(page, command) for command in commands}


def lora(page: Path) -> Done:
    """Tune adapters with the section's files, as the page says and in 4 bits, and merge them in both ways."""
    command, convert_it = (item for snippet in fences(page, "bash") for item in items(snippet))
    small = exchange(command, SMALLEST, page)
    for launch in (small, f"{small} --lora-quantize nf4 --overwrite"):
        expect(shell(launch, page), ["done: 2 iterations"], page)
    (merge,) = fences(page, "python")
    exec(compile(merge.text, merge.place, "exec"), {"__name__": merge.place})
    shutil.rmtree("merged")
    start(convert_it, page)
    return {key(page, command), key(page, convert_it), key(page, merge.text)}


def configuration(page: Path) -> Done:
    """The samples are files of runs, behind which words of the command line make them small."""
    sample, of_llm = fences(page, "yaml")
    Path("run.yaml").write_text(sample.text, encoding="utf-8")
    (published,) = re.findall(r"&HF_MODEL_LOAD_PATH (\S+)", sample.text)
    Path(published).parent.mkdir(parents=True)
    Path(published).symlink_to(Path(HF).resolve())
    Path("configs").symlink_to(ROOT / "configs")
    output = start(f"python pretrain_transformers.py run.yaml {AFTER_YAML}", page)
    expect(output, ["done: 1 iterations"], page)
    Path("llm.yaml").write_text(of_llm.text, encoding="utf-8")
    (published,) = re.findall(r"model_name_or_path: (\S+)", of_llm.text)
    write_gpt_oss(Path(published))
    row = {"instruction": "What is this?", "input": "", "output": "A cat."}
    Path("data/rows.json").write_text(json.dumps([row]), encoding="utf-8")
    output = start(f"python train_fsdp2.py llm.yaml {AFTER_LLM_YAML}", page)
    expect(output, ["done: 1 iterations"], page)
    return {key(page, sample.text), key(page, of_llm.text)}


def write_gpt_oss(folder: Path) -> None:
    """A tiny GPT-OSS."""
    from transformers import GptOssConfig

    from mindspeed_mm.tools import tiny_models

    tokenizer = tiny_models.build_byte_bpe_tokenizer(["What is this? A cat."] * 9, 320, folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(vocab_size=320, **sizes, **heads, architectures=["GptOssForCausalLM"])
    tiny_models.save_model_dir(config, tokenizer, folder, 0)


def convert(page: Path) -> Done:
    """Every command of `mm-convert`, on the run folder, which names its best checkpoint as one of --save-best does."""
    best = {"iteration": 2, "metric": "loss", "value": 1.25}
    Path("runs/mine/best.json").write_text(json.dumps(best), encoding="utf-8")
    done = set()
    for snippet in fences(page, "bash"):
        for command in items(snippet):
            shutil.rmtree("out", ignore_errors=True)
            places = {**PLACES, **({"RUN": "runs/yaml"} if "--averaged" in command else {})}
            start(shlex.join(places.get(word, word) for word in shlex.split(command)), page)
            done.add(key(page, command))
    return done


def migrating(page: Path) -> Done:
    """Every message that is shown is what a launch prints, with the flags or the file that it is about."""
    Path("older").mkdir()
    model = {**json.loads(Path("model.json").read_text()), "text_decoder": {"ckpt_path": "converted.pt"}}
    Path("older/model.json").write_text(json.dumps(model), encoding="utf-8")
    taken = start(f"{LAUNCH} {WITHOUT_EFFECT}", page)
    done = set()
    for line in (line for snippet in fences(page, "") for line in items(snippet)):
        if line.startswith("[WARNING]"):
            expect(taken, [line], page)
        else:
            flags = next((flags for sign, flags in REFUSED.items() if sign in line), None)
            if flags is None:
                continue
            output = start(f"{LAUNCH} {flags}", page, fails=True).replace("older/model.json", "model.json")
            expect(output, [line], page)
        done.add(key(page, line))
    return done
