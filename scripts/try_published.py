"""What published launches would train: each launch of a folder goes through `--dry-run`, at its own world size.

    python scripts/try_published.py FOLDER                  # a table, and how many were refused for which reason
    python scripts/try_published.py FOLDER --notices        # also the notices of the accepted ones
    python scripts/try_published.py FOLDER --write          # also write the table of the migration guides

The folder contains `launches.json` (launch script → list of launches: `launcher_words`, `entry`, `words`,
`environment`) and `files/`, the configuration files that they name. Nothing is trained. Where a file names a model's
directory, one with a config.json only is created, which has the numbers of the size that the name states.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package, and the published sizes of tests/support

#: part of a directory's name → family of tests/support, published size of it, architecture. The numbers of a size, and
#: their sources, are there; a test compares the parameters of each with the number that its authors state.
_DIRECTORIES = (
    (r"Qwen2\.5-VL-(?P<size>\d+B)", "qwen2_5_vl", None, "Qwen2_5_VLForConditionalGeneration"),
    (r"Qwen2\.5-(?:VL-)?Omni-7B", "qwen2_5_omni", "7B", "Qwen2_5OmniThinkerForConditionalGeneration"),
    (r"Qwen3-Omni-30B", "qwen3_omni_moe", "30B-A3B", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    (r"Qwen3-ASR-1\.7B", "qwen3_asr", "1.7B", "Qwen3ASRForConditionalGeneration"),
    (r"Qwen3-VL-30B", "qwen3_vl_moe", "30B-A3B", "Qwen3VLMoeForConditionalGeneration"),
    (r"Qwen3-VL-235B", "qwen3_vl_moe", "235B-A22B", "Qwen3VLMoeForConditionalGeneration"),
    (r"Qwen3-VL-(?P<size>\d+B)", "qwen3_vl", None, "Qwen3VLForConditionalGeneration"),
    (r"GLM-4\.5V", "glm4v_moe", "106B", "Glm4vMoeForConditionalGeneration"),
    (r"InternVL3_5-30B", "internvl_moe", "30B-A3B", "InternVLForConditionalGeneration"),
    (r"Qwen3[56]-(?P<size>\d+B)", "qwen3_5", None, "Qwen3_5ForConditionalGeneration"),
    (r"Qwen3[56]-35B", "qwen3_5_moe", "35B-A3B", "Qwen3_5MoeForConditionalGeneration"),
    (r"Qwen3[56]-122B", "qwen3_5_moe", "122B-A10B", "Qwen3_5MoeForConditionalGeneration"),
    (r"Qwen3[56]-397B", "qwen3_5_moe", "397B-A17B", "Qwen3_5MoeForConditionalGeneration"),
    (r"models/kimik2_5", "kimi_k25", "1T", "KimiK25ForConditionalGeneration"),
    (r"Magistral-Small", "mistral3", "24B", "Mistral3ForConditionalGeneration"),
)
_GUIDES = tuple(ROOT / "docs" / name for name in ("migrating.md", "migrating.zh.md"))
_BEGIN, _END = "<!-- published launches: begin -->", "<!-- published launches: end -->"
#: entry scripts that won't be there → why
_NOT_THERE = {
    "mindspeed_mm/fsdp/tasks/funasr/trainer.py": "it trains its authors' own FunASRNano, with a CTC decoder that "
    "transformers' FunAsrNanoForConditionalGeneration lacks",
    "mindspeed_mm/fsdp/tasks/cosyvoice3/train.py": "it trains the CosyVoice3LM of its authors' own code, and "
    "transformers has no class of CosyVoice3",
}
#: the autoencoder of Wan 2.1, which the 14B sizes of Wan 2.2 share, and that of Wan 2.2 5B; as diffusers' script
#: convert_wan_to_diffusers.py writes them
_AUTOENCODERS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        r"Wan2\.2-TI2V-5B.*/vae/?$",
        {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "in_channels": 12, "out_channels": 12}
        | {"patch_size": 2, "is_residual": True, "scale_factor_temporal": 4, "scale_factor_spatial": 16},
    ),
    (r"Wan2\.\d.*/vae/?$", {}),
)
#: scripts that extract features → the predictor of a model.json without one
_FEATURES = {
    f"mindspeed_mm/tools/feature_extraction/get_{name}_feature.py": family
    for name, family in (("sora", None), ("wan", "wan"), ("vace", "wan"))
}
#: a question with options, as VLMEvalKit publishes them
_ROW_OF_A_BENCHMARK = "index\timage\tquestion\tA\tB\tanswer\n0\t" + "A" * 80 + "\twhat\tone\ttwo\tA\n"
#: names of files; every other path is that of a directory
_FILE = re.compile(r"\.(json|jsonl|txt|yaml|csv|tsv|parquet|safetensors|pt|pth|mp4|png|jpe?g|py)$")


class Outcome(NamedTuple):
    """Result of a launch: the answer of its dry run, or of its configuration files, and the seconds that it took."""

    answer: Mapping[str, Any]
    seconds: float = 0.0

    @property
    def refusal(self) -> str | None:
        """First line of the refusal; None of a launch that is accepted."""
        refusal = self.answer.get("refusal")
        return re.sub(r"^\w+Error: ", "", str(refusal)).splitlines()[0] if refusal is not None else None


def config_of(path: str) -> dict[str, Any]:
    """The config.json of the model that a directory's name states.

    An empty one for parts of a pipeline, and for models and sizes whose numbers aren't known.
    """
    from tests.support.families import families

    for pattern, family, size, architecture in _DIRECTORIES:
        match = re.search(pattern, path)
        published = families()[family].published if match else {}
        if match and (size or match["size"]) in published:
            config: dict[str, Any] = published[size or match["size"]][0]().to_dict()
            return {**config, "architectures": [architecture]}
    for pattern, structure in _AUTOENCODERS:
        if re.search(pattern, path):
            return {"_class_name": "AutoencoderKLWan", **structure}
    return {}


def paths_in(content: Any) -> Iterator[str]:
    """Every text in a file's content, or among a launch's words, that names a place of the file system."""
    if isinstance(content, str):
        is_path = "/" in content and not content.startswith("http") and "\n" not in content and len(content) < 200
        if is_path or (_FILE.search(content) and " " not in content):
            yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from paths_in(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from paths_in(value)


def read(path: Path) -> Any:
    """A configuration file's content, leniently: what can't be read is reported by the configuration layer."""
    import yaml

    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError):
        return None


def stand_in(folder: Path, path: str) -> None:
    """Put something where a launch expects a file or a directory, unless it's there."""
    place = folder / path
    if place.exists() or (path.startswith("/") and not place.is_relative_to(folder)):
        return
    if _FILE.search(path):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_ROW_OF_A_BENCHMARK if place.suffix == ".tsv" else "")
        return
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config_of(path)))


def prepare(source: Path, folder: Path, launches: Sequence[Mapping[str, Any]]) -> None:
    """Copy the configuration files; absolute paths in them begin in the folder. Then put stand-ins for the rest."""
    for file in sorted(source.rglob("*")):
        if file.is_file():
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix in (".json", ".yaml"):
                text = re.sub(r"(?<=[\s\"'])/(?=[\w<])", f"{folder}/", file.read_text(encoding="utf-8"))
                size = re.search(r"_(\d+B)_", file.name)  # of a directory that is left open in the file
                copy.write_text(text.replace("-xxB", f"-{size[1]}") if size else text)
            else:
                shutil.copy(file, copy)
    for launch in launches:
        words = launch["words"]
        for word, value in zip(words, [*words[1:], ""], strict=True):
            if word == "--load":
                stand_in(folder, value)
    for pictures in sorted(folder.rglob("*images.txt")):
        for picture in pictures.read_text(encoding="utf-8").split():
            stand_in(folder, picture)
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".json", ".yaml") and file.is_relative_to(folder / "examples"):
            for path in paths_in(read(file)):
                stand_in(folder, path)


def world_size(words: Sequence[str]) -> int:
    """Number of processes in a launcher's words."""
    options = {word.lstrip("-").replace("-", "_"): value for word, value in itertools.pairwise(words)}
    return int(options.get("nproc_per_node", 1)) * int(options.get("nnodes", 1))


def answer_of(entry: str, words: list[str], processes: int) -> dict[str, Any]:
    """The answer of a launch's dry run."""
    from mindspeed_mm.dry_run import dry_run
    from mindspeed_mm.tasks.evaluation import command as evaluation
    from mindspeed_mm.tasks.generation import inference
    from mindspeed_mm.tasks.inference import command as answers
    from mindspeed_mm.tasks.train.generation import SORA
    from mindspeed_mm.tasks.train.language import TRANSFORMERS, VLM
    from mindspeed_mm.tools.feature_extraction import command

    recipes = {"pretrain_vlm.py": VLM, "pretrain_sora.py": SORA, "pretrain_transformers.py": TRANSFORMERS}
    recipes |= dict.fromkeys(("train_fsdp2.py", "mindspeed_mm/fsdp/train/trainer.py"), TRANSFORMERS)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if entry in recipes:
            dry_run(recipes[entry], [*words, "--dry-run", "--world-size", str(processes)])
        elif entry == "inference_sora.py":
            inference.main([*words, "--dry-run"])
        elif entry == "evaluate_vlm.py":
            evaluation.main([*words, "--dry-run", "--world-size", str(processes)])
        elif entry == "inference_vlm.py":
            answers.main([*words, "--dry-run", "--world-size", str(processes)])
        else:
            command.main([*words, "--dry-run"], script=Path(entry).name, family=_FEATURES[entry])
    answer: dict[str, Any] = json.loads(printed.getvalue())
    return answer


def outcome_of(launch: Mapping[str, Any], folder: str) -> Outcome:
    """Describe one launch in this process, which is started for it."""
    started = time.perf_counter()
    entry = re.sub(r"^\./", "", launch["entry"])
    if not (ROOT / entry).is_file():
        return Outcome(
            {"accepted": False, "refusal": _NOT_THERE.get(entry, f"{entry} is not there yet"), "notices": []}
        )
    os.chdir(folder)
    words, processes = list(launch["words"]), world_size(launch["launcher_words"])
    os.environ.update(launch["environment"])
    try:
        answer = answer_of(entry, words, processes)
    except Exception as error:  # a defect, which is a row of the table, too
        answer = {"accepted": False, "refusal": f"CRASHED: {type(error).__name__}: {error}", "notices": []}
    return Outcome(_with_unknown_size(answer), time.perf_counter() - started)


def _with_unknown_size(answer: dict[str, Any]) -> dict[str, Any]:
    """State of a launch that is refused for a stand-in without numbers that its size is unknown."""
    refusal = answer.get("refusal") or ""
    for directory in re.findall(r"'([^']+)'", refusal):
        config = Path(directory) / "config.json"
        if config.is_file() and config.read_text() == "{}":
            return {**answer, "refusal": f"size unknown: the numbers of '{directory}' aren't known to this script"}
    return answer


def _without_file(refusal: str) -> str:
    return re.sub(r"^(\./)?\S+\.(json|yaml)[^:]*: ", "", refusal)


def reason(refusal: str) -> str:
    """What a refusal is about, without the names of files and the values found."""
    line = _without_file(refusal)
    line = re.sub(r"^'[\w.]+' is \S+; ", "", line)
    return re.sub(r"^--[\w-]+ .*?: ", "", line)


def main() -> int:
    """Print the table; the exit status is 0 whatever was accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of launches.json and files/")
    parser.add_argument("--notices", action="store_true", help="print the notices of accepted launches")
    parser.add_argument("--write", action="store_true", help="write the table of the migration guides")
    options = parser.parse_args()
    launches: dict[str, list[dict[str, Any]]] = json.loads((options.folder / "launches.json").read_text())
    found = outcomes(options.folder / "files", launches)
    print_table(found)
    refused = Counter(reason(outcome.refusal) for outcome in found.values() if outcome.refusal is not None)
    print(f"\n{len(found) - refused.total()} of {len(found)} accepted")
    for why, count in refused.most_common():
        print(f"{count:4} {why}")
    if options.write:
        for guide in _GUIDES:
            write_table(guide, found)
    if options.notices:
        scripts_of: dict[str, list[str]] = {}
        for script, outcome in found.items():
            for line in outcome.answer["notices"] if outcome.refusal is None else ():
                scripts_of.setdefault(line, []).append(script)
        print()
        for line, scripts in scripts_of.items():
            print(f"{len(scripts):4} {line}   [{scripts[0]}]")
    return 0


def print_table(found: Mapping[str, Outcome]) -> None:
    """Print a line for each script: accepted or the refusal, model, layout, parts, number of notices, seconds."""
    rows = [("script", "state", "model", "parameters", "layout", "parts", "notices", "seconds")]
    for script, outcome in found.items():
        name, answer = script.removeprefix("examples/"), outcome.answer
        model, layout = answer.get("model") or {}, answer.get("layout") or {}
        parameters = model.get("parameters")
        rows.append(
            (
                name,
                "accepted" if outcome.refusal is None else "refused",
                model.get("class", ""),
                f"{parameters / 1e9:.1f} B{_beside_name(name, parameters)}" if parameters else "",
                _layout(layout) if layout else "",
                next((f"{len(answer[key])} {key}" for key in ("stages", "units") if answer.get(key)), ""),
                str(len(answer["notices"])),
                f"{outcome.seconds:.1f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    refusals = [None, *(outcome.refusal for outcome in found.values())]
    for row, refusal in zip(rows, refusals, strict=True):
        cells = row if refusal is None else (*row[:2], refusal)
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip())


def write_table(guide: Path, found: Mapping[str, Outcome]) -> None:
    """Write, between the marks of a migration guide, what each launch would train, or why it is refused."""
    rows = []
    for script, outcome in found.items():
        answer = outcome.answer
        model, layout = answer.get("model") or {}, answer.get("layout") or {}
        if outcome.refusal is not None:
            said = "refused: " + _without_file(outcome.refusal)
        elif model:
            said = f"{model['class']}, {model['parameters'] / 1e9:.1f} B, {_layout(layout)}"
        else:
            said = "accepted"
        rows.append(f"| {script.removeprefix('examples/')} | {said.replace('|', '/')} |")
    accepted = sum(outcome.refusal is None for outcome in found.values())
    before, rest = guide.read_text(encoding="utf-8").split(_BEGIN)
    head = f"| {accepted} / {len(found)} | |\n|---|---|\n"
    guide.write_text(f"{before}{_BEGIN}\n{head}" + "\n".join(rows) + f"\n{_END}{rest.split(_END)[1]}", encoding="utf-8")


def _layout(layout: Mapping[str, Any]) -> str:
    """A layout as its backend, its world size, and the sizes that are above 1."""
    sizes = [f"{n} {v}" for n, v in layout.items() if n not in ("backend", "world_size") and v != 1]
    return f"{layout['backend']} {layout['world_size']}" + (f" = {' × '.join(sizes)}" if sizes else "")


def _beside_name(script: str, parameters: int) -> str:
    """A mark where a number of parameters isn't the size that the script's name states.

    Names count neither embeddings nor towers exactly: a model of 3 B in its name may have 3.8 B parameters.
    """
    named = re.search(r"(?<![\d.])A?(\d+(?:\.\d+)?)[bB](?![a-z])", script)
    if named is None or 0.9 <= parameters / 1e9 / float(named[1]) <= 1.3:
        return ""
    return f" (not {named[1]} B)"


def outcomes(files: Path, launches: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Outcome]:
    """Script → what became of its launches: the first refused one counts for all. One process each."""
    multiprocessing.set_forkserver_preload(["mindspeed_mm.initialize", "diffusers", "transformers"])
    every = [(script, launch) for script, several in launches.items() for launch in several]
    with tempfile.TemporaryDirectory(prefix="try-published-") as folder:
        prepare(files, Path(folder), [launch for _, launch in every])
        context = multiprocessing.get_context("forkserver")
        with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1) as pool:
            results = list(pool.map(outcome_of, [launch for _, launch in every], [folder] * len(every)))
    found: dict[str, Outcome] = {}
    for (script, _), outcome in zip(every, results, strict=True):
        if script not in found or found[script].refusal is None:
            found[script] = outcome
    return found


if __name__ == "__main__":
    raise SystemExit(main())
