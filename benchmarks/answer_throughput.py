"""Answers a second: `inference_vlm.py` over a file of rows against a plain loop of `generate`, row by row.

    OMP_NUM_THREADS=1 python benchmarks/answer_throughput.py [--rounds 3] [--batch-size N] [text images text_model]

The plain loop reads the rows, and gives each to transformers' processor and to `generate`. Ours is what the command
does: it reads and measures the rows, plans batches, encodes, answers, and writes the file. Both begin at the model's
directory and the file, so that both load the weights. Every answer of ours is compared with the loop's, text and number
of tokens.

Models have random weights of float32 and a vocabulary of 16384. The layers' weights are 3 times the usual, so that
answers don't repeat themselves, and the output row of the token that ends an answer is longer than the others, so that
answers end after 1 to 128 tokens, a third of them because they may not be longer.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import add_smallest, alternate, median, photographs

TEXT, VL = "Qwen3ForCausalLM", "Qwen2_5_VLForConditionalGeneration"
PARTS = {"text_model": (TEXT, 0), "text": (VL, 0), "images": (VL, 1)}  # model, and pictures of a row
Answers = list[tuple[str, int]]  # text and number of tokens of each row's answer


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        rows: of each file.
        rounds: of the comparison.
        new_tokens: of the longest answer.
        vocabulary, hidden, layers: of the models.
        picture: width and height in pixels.
    """

    rows: int = 200
    rounds: int = 3
    new_tokens: int = 128
    vocabulary: int = 16384
    hidden: int = 256
    layers: int = 6
    picture: tuple[int, int] = (336, 252)


SMALLEST = Sizes(rows=8, rounds=1, new_tokens=8, vocabulary=400, hidden=64, layers=2, picture=(56, 56))


def main() -> None:
    """Print, for each part, answers a second of both, their ratio, and how many answers are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="which; none = all")
    parser.add_argument("--rounds", type=int, help="of each comparison")
    parser.add_argument("--batch-size", type=int, help="of ours; absent = the command's own choice")
    add_smallest(parser)
    options = parser.parse_args()
    sizes = SMALLEST if options.smallest else Sizes()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        for part in options.parts or PARTS:
            compare(part, Path(folder), sizes, options.rounds or sizes.rounds, options.batch_size)


def compare(part: str, folder: Path, sizes: Sizes, rounds: int, batch_size: int | None) -> None:
    """Answer the rows of a part both ways, in turn, and print a line."""
    architecture, pictures = PARTS[part]
    hf_dir = model_directory(folder / architecture, architecture, sizes)
    rows = row_file(folder / f"{part}.jsonl", pictures, sizes)
    plain: Answers = []
    ours: Answers = []

    def timed(answer: Callable[[], Answers], into: Answers) -> list[float]:
        started = time.perf_counter()
        into[:] = answer()
        return [sizes.rows / (time.perf_counter() - started)]

    words = ["--load", str(hf_dir), "--data-path", str(rows), "--max-new-tokens", str(sizes.new_tokens), "--overwrite"]
    words += ["--batch-size", str(batch_size)] if batch_size else []
    answer_by_command([*words, "--output", str(folder / "warm.jsonl")])  # imports, which a process pays once
    speeds = alternate(
        {
            "plain": lambda: timed(lambda: answer_one_by_one(hf_dir, rows, sizes.new_tokens), plain),
            "ours": lambda: timed(lambda: answer_by_command([*words, "--output", str(folder / "ours.jsonl")]), ours),
        },
        rounds,
    )
    rate = {name: median(values) for name, values in speeds.items()}
    equal = sum(one == other for one, other in zip(plain, ours, strict=True))
    lengths = sorted(count for _, count in plain)
    print(
        f"{part}: one by one {rate['plain']:.2f} answers/s, inference_vlm.py {rate['ours']:.2f}, ratio "
        f"{rate['ours'] / rate['plain']:.2f}; {equal} of {len(plain)} answers equal; answers of {lengths[0]} to "
        f"{lengths[-1]} tokens, {sum(lengths) / len(lengths):.1f} on average",
        flush=True,
    )
    if equal < len(plain):
        raise SystemExit(f"{part}: {len(plain) - equal} answers differ from those of `generate` alone")


def answer_by_command(words: list[str]) -> Answers:
    """The answers of inference_vlm.py's own path, from flags to the file."""
    from mindspeed_mm.tasks.inference.describe import describe_answers
    from mindspeed_mm.tasks.inference.rows import answer_into_file

    return [(line["answer"], line["new_tokens"]) for line in answer_into_file(describe_answers(words))]


def answer_one_by_one(hf_dir: Path, file: Path, new_tokens: int) -> Answers:
    """The answers of transformers' processor and `generate`, a row at a time."""
    import transformers
    from PIL import Image

    name = transformers.AutoConfig.from_pretrained(hf_dir).architectures[0]
    reads_pictures = name == VL
    processor: Any = (transformers.AutoProcessor if reads_pictures else transformers.AutoTokenizer).from_pretrained(
        hf_dir
    )
    tokenizer = processor.tokenizer if reads_pictures else processor
    model = getattr(transformers, name).from_pretrained(hf_dir, dtype=torch.float32).eval()
    answers = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        content = row["messages"][0]["content"].removeprefix("<image>")
        if reads_pictures:
            pictures = [{"type": "image"}] * len(row["images"])
            content = [*pictures, {"type": "text", "text": content}]
        turn = [{"role": "user", "content": content}]
        text = processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        media = {"images": [Image.open(path).convert("RGB") for path in row["images"]]} if row["images"] else {}
        inputs = processor(text=[text], return_tensors="pt", **media)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)[0, inputs["input_ids"].shape[1] :]
        answers.append((tokenizer.decode(ids, skip_special_tokens=True), len(ids)))
    return answers


def model_directory(folder: Path, architecture: str, sizes: Sizes) -> Path:
    """Write a model with its tokenizer or processor, once."""
    import transformers

    from mindspeed_mm.tools import tiny_models as tiny

    if folder.exists():
        return folder
    rng = random.Random(0)
    words = lexicon(rng, sizes)
    texts = [" ".join(rng.choices(words, k=50)) for _ in range(len(words) // 20)]
    tokenizer = tiny.build_byte_bpe_tokenizer(texts, sizes.vocabulary, folder)
    text = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.hidden * 11 // 4,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": 4,
    }
    config: Any
    if architecture == VL:
        tiny.build_qwen2_5_vl_processor(tokenizer, folder, max_pixels=28 * 28 * 256)
        vision = {"hidden_size": 96, "intermediate_size": 256, "depth": 4, "num_heads": 4}
        config = tiny.qwen2_5_vl_config(tokenizer, text=text, vision=vision)
    else:
        text["head_dim"] = sizes.hidden // 4
        config = tiny.qwen3_config(tokenizer, text=text, tie_word_embeddings=False)
    tiny.save_model_dir(config, tokenizer, folder, seed=0)
    model = getattr(transformers, architecture).from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "layers" in name:
                weight *= 3
        model.get_output_embeddings().weight[tokenizer.eos_token_id] *= 2.5
    model.save_pretrained(folder)
    return folder


def lexicon(rng: random.Random, sizes: Sizes) -> list[str]:
    """Words of syllables, enough for the tokenizer's vocabulary."""
    return [
        "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))
        for _ in range(2 * sizes.vocabulary)
    ]


def row_file(file: Path, pictures: int, sizes: Sizes) -> Path:
    """Write the rows: questions of 4 to 120 words, each with its pictures before it."""
    rng = random.Random(2)
    words = lexicon(rng, sizes)
    files = photographs(file.with_suffix(""), sizes.rows * pictures, sizes.picture)
    with open(file, "w", encoding="utf-8") as target:
        for number in range(sizes.rows):
            question = "<image>" * pictures + " ".join(rng.choices(words, k=round(4 * 30 ** rng.random())))
            images = [str(path) for path in files[number * pictures : (number + 1) * pictures]]
            row = {"messages": [{"role": "user", "content": question}], "images": images}
            target.write(json.dumps(row) + "\n")
    return file


if __name__ == "__main__":
    main()
