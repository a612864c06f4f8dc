"""How long a step with compiled blocks takes, against the same step without: the target is 0.9 of its time.

    python benchmarks/compiled_step.py                              # about 7 minutes on two cores
    python benchmarks/compiled_step.py --cases clips --dtypes bf16

Both loops are ours, in processes of their own, over the same micro-batches in turn: packs of text, packs with images
(the Qwen2.5-VL of 4.9 M parameters) and extracted clips (the Wan of 5.5 M parameters of generation_step.py). Each goes
through all micro-batches before, so that nothing is compiled meanwhile. Compared are passes over all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CASES, DTYPES = ("text", "images", "clips"), ("fp32", "bf16")
BATCHES, ROWS, TARGET = 6, 60, 0.9
LOGGED = 10  # steps at a run's begin


def main() -> None:
    """Compare each case, plain and compiled in processes of their own, and print the ratios."""
    from common import add_smallest

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--pairs", type=int, default=3, help="processes of each: two alike may differ by a hundredth")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each process over all micro-batches")
    parser.add_argument("--worker", nargs=3, metavar=("CASE", "DTYPE", "HOW"))
    parser.add_argument("--folder", type=Path)
    add_smallest(parser)
    options = parser.parse_args()
    if options.worker:
        train_on_demand(*options.worker, options.folder, smallest=options.smallest)
        return
    if options.smallest:
        options.pairs, options.rounds, options.cases, options.dtypes = 1, 1, ("text",), ("fp32",)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="compiled-step-"))
    for case in options.cases:
        for dtype in options.dtypes:
            compare(case, dtype, folder, options)


def compare(case: str, dtype: str, folder: Path, options: argparse.Namespace) -> None:
    """Let pairs of processes train in turn, and print medians of their steps and the ratio."""
    from common import BlockServer, median

    ratios, steps = [], []
    for pair in range(options.pairs):
        servers = []
        for how in ("plain", "compiled"):
            place = folder / f"{case}-{dtype}-{how}-{pair}"
            place.mkdir(parents=True)
            words = [str(Path(__file__).resolve()), "--worker", case, dtype, how, "--folder", str(place)]
            servers.append(BlockServer([*words, *(["--smallest"] if options.smallest else [])], place / "errors.txt"))
            servers[-1].block()  # compiles
        for _ in range(options.rounds):
            plain, compiled = (server.block() for server in servers)
            steps.append(plain[0])
            ratios.append([other / time for other, time in zip(compiled, plain)])
        for server in servers:
            server.close()
    clock, processor = (median(column) for column in zip(*ratios))
    print(
        f"{case}, {dtype}: a step of {1000 * median(steps):.0f} ms takes compiled {clock:.3f} of its time, of the "
        f"processor's {processor:.3f} (target <= {TARGET})",
        flush=True,
    )


def train_on_demand(case: str, dtype: str, how: str, folder: Path, *, smallest: bool) -> None:
    """Pass over all micro-batches for each line that comes; answer a step's seconds, of the clock and the processor."""
    import torch

    torch.set_num_threads(1)
    make = clips if case == "clips" else packs
    loop, batches = make(case, dtype, folder, is_compiled=how == "compiled", smallest=smallest)
    for _ in sys.stdin:
        print("times " + json.dumps([seconds / batches for seconds in one_pass(loop, batches)]), flush=True)


def one_pass(loop: Any, steps: int) -> tuple[float, float]:
    """Seconds of the clock and of the processor of some steps."""
    from samples_per_second import clocks

    began = ended = (0.0, 0.0)

    def before_step(done: int) -> bool:
        nonlocal began, ended
        if not done:
            began = clocks()
        ended = clocks()
        return done < steps

    loop.train(before_step, iteration=LOGGED)
    return ended[0] - began[0], ended[1] - began[1]


def packs(case: str, dtype: str, folder: Path, *, is_compiled: bool, smallest: bool) -> tuple[Any, int]:
    """A loop over packs, and their number."""
    from common import launch_words, write_files
    from our_loop import OurLoop
    from samples_per_second import dataset_of, make_rows

    from mindspeed_mm.data import build_mm_dataloader
    from mindspeed_mm.data.adapter import DefaultAdapter

    make_rows(folder, ROWS, with_images=case == "images", smallest=smallest)
    loader = iter(build_mm_dataloader(dataset_of(folder, packing=True), {}, micro_batch_size=1, global_batch_size=1))
    batches = [dict(next(loader)) for _ in range(BATCHES)]
    files = write_files(folder / "files", folder / "hf", folder / "data" / "rows.json")
    flags = {"torch_compile": is_compiled, "bf16": dtype == "bf16"}
    words = launch_words(files, None, micro_batch_size=1, global_batch_size=1, train_iters=100_000, **flags)
    return OurLoop("pretrain_transformers.py", words, batches, 1, DefaultAdapter(), prepares=True), len(batches)


def clips(case: str, dtype: str, folder: Path, *, is_compiled: bool, smallest: bool) -> tuple[Any, int]:
    """A loop over clips that are encoded before, and the number of micro-batches."""
    from common import launch_words
    from generation_step import ROWS as CLIPS
    from generation_step import features, micro_batches, model_json, prepare
    from our_loop import OurLoop

    prepare(folder)
    contents = {
        "mm_model": ("model.json", json.dumps(model_json(folder))),
        "mm_data": (
            "data.json",
            json.dumps({"dataset_param": {"dataset_type": "t2v", "basic_parameters": {"data_path": "unused"}}}),
        ),
        "mm_tool": ("tools.json", "{}"),
        "fsdp2_config_path": ("fsdp2.yaml", "sub_modules_to_wrap: ['predictor.blocks.{*}']\n"),
    }
    for file, text in contents.values():
        (folder / file).write_text(text)
    files = {flag: folder / file for flag, (file, _) in contents.items()}
    batches = micro_batches(0)

    def loop(compiles: bool, over: list[dict[str, Any]]) -> Any:
        flags = {"torch_compile": compiles, "bf16": dtype == "bf16"}
        words = launch_words(files, None, micro_batch_size=CLIPS, global_batch_size=CLIPS, train_iters=100_000, **flags)
        return OurLoop("pretrain_sora.py", words, over, CLIPS)

    encoded = features(loop(False, batches).backend.model, batches)
    return loop(is_compiled, encoded), len(encoded)


if __name__ == "__main__":
    main()
