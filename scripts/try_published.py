"""Which published launches are taken: every launch of a folder goes through the configuration layer.

    python scripts/try_published.py FOLDER                  # a table, and how many were refused for which reason
    python scripts/try_published.py FOLDER --notices        # also the notices of the accepted ones

The folder contains `launches.json` (launch script → list of launches: `launcher_words`, `entry`, `words`,
`environment`) and `files/`, the configuration files that they name. Nothing is trained. Where a file names a model's
directory, one with a config.json only is created.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package, and the published sizes of tests/support

#: part of a directory's name → family of tests/support, its size, its architecture
_DIRECTORIES = (
    (r"Qwen2\.5-VL-(\d+B)", "qwen2_5_vl", None, "Qwen2_5_VLForConditionalGeneration"),
    (r"Qwen2\.5-(?:VL-)?Omni", "qwen2_5_omni", "7B", "Qwen2_5OmniThinkerForConditionalGeneration"),
    (r"Qwen3-Omni", "qwen3_omni_moe", "30B-A3B", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    (r"Qwen3-VL-(?:30B|235B)", "qwen3_vl_moe", "30B-A3B", "Qwen3VLMoeForConditionalGeneration"),
    (r"Qwen3-VL", "qwen3_vl", "8B", "Qwen3VLForConditionalGeneration"),
    (r"GLM-4\.5V", "glm4v_moe", "106B", "Glm4vMoeForConditionalGeneration"),
    (r"InternVL3_5-30B", "internvl_moe", "30B-A3B", "InternVLForConditionalGeneration"),
    (r"Magistral", "mistral3", "24B", "Mistral3ForConditionalGeneration"),
)
#: the numbers of a size that its launches are checked against
_QWEN2_5_VL: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "3B": (2048, 11008, 36, 16, 2, 3420),
    "7B": (3584, 18944, 28, 28, 4, 3420),
    "32B": (5120, 27648, 64, 40, 8, 3456),
    "72B": (8192, 29568, 80, 64, 8, 3456),
}
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
#: names of files; every other path is that of a directory
_FILE = re.compile(r"\.(json|jsonl|txt|yaml|csv|tsv|parquet|safetensors|pt|pth|mp4|png|jpe?g|py)$")


class Outcome(NamedTuple):
    """What became of a launch: the refusal, None if it was accepted, and the logged notices."""

    refusal: str | None
    notices: tuple[str, ...] = ()


def config_of(path: str) -> dict[str, Any]:
    """The config.json of the model that a directory's name suggests; an empty one for parts of a pipeline."""
    from tests.support.families import families

    for pattern, family, size, architecture in _DIRECTORIES:
        match = re.search(pattern, path)
        if match:
            config = families()[family].published[size or "7B"][0]().to_dict()
            if size is None:
                *text, vision = _QWEN2_5_VL[match[1]]
                config["tie_word_embeddings"] = match[1] == "3B"
                config["text_config"] |= {**dict(zip(_NAMES, text, strict=True)), "rms_norm_eps": 1e-6}
                config["text_config"].pop("layer_types", None)  # one for each layer; created again
                rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
                config["text_config"]["rope_parameters"] = rope
                config["vision_config"] |= {
                    "intermediate_size": vision,
                    "out_hidden_size": text[0],
                    "tokens_per_second": 2,
                }
            return {**config, "architectures": [architecture]}
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
        place.write_text("")
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
                copy.write_text(re.sub(r"(?<=[\s\"'])/(?=[\w<])", f"{folder}/", file.read_text(encoding="utf-8")))
            else:
                shutil.copy(file, copy)
    for launch in launches:
        words = launch["words"]
        for word, value in zip(words, [*words[1:], ""], strict=True):
            if word == "--load":
                stand_in(folder, value)
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".json", ".yaml") and file.is_relative_to(folder / "examples"):
            for path in paths_in(read(file)):
                stand_in(folder, path)


def world_size(words: Sequence[str]) -> int:
    """Number of processes in a launcher's words."""
    options = {word.lstrip("-").replace("-", "_"): value for word, value in itertools.pairwise(words)}
    return int(options.get("nproc_per_node", 1)) * int(options.get("nnodes", 1))


def describe(entry: str, words: list[str]) -> None:
    """Read a launch as its entry script does, up to what needs devices and weights."""
    from mindspeed_mm.configs.describe import describe as described
    from mindspeed_mm.configs.fsdp2_config import load_fsdp2_config
    from mindspeed_mm.tasks.train.generation import SORA
    from mindspeed_mm.tasks.train.language import TRANSFORMERS, VLM

    if entry == "inference_sora.py":
        return _inference(words)
    if entry.startswith("mindspeed_mm/tools/feature_extraction/"):
        return _features(words, Path(entry).name)
    run = described(words, {"pretrain_vlm.py": VLM, "pretrain_sora.py": SORA}.get(entry, TRANSFORMERS))
    if run.uses_fsdp2:
        load_fsdp2_config(run.parallel.fsdp2_config_path)


def _inference(words: list[str]) -> None:
    from mindspeed_mm.configs.sora_inference import SoRAInferenceConfig
    from mindspeed_mm.tasks.generation.options import parse_flags, read_images, read_prompts, sampling_options

    flags = parse_flags(words)
    config = SoRAInferenceConfig.from_file(flags.mm_model, flags.mm_data)
    prompts = read_prompts(flags.prompts or config.sampling.prompt)
    images = flags.images or config.sampling.image
    for picture in Path(images).read_text().split() if images else []:
        stand_in(Path.cwd(), picture)
    read_images(images, len(prompts))
    sampling_options(flags, config.sampling)


def _features(words: list[str], script: str) -> None:
    from mindspeed_mm.configs.generation_data import GenerationDataConfig
    from mindspeed_mm.configs.sora_config import SoRAModelConfig
    from mindspeed_mm.tools.feature_extraction import command

    options = command._parse(words, script)
    for section, file in ((SoRAModelConfig, options.mm_model), (GenerationDataConfig, options.mm_data)):
        section.from_dict(read(Path(file)), file=file)


def outcome_of(launch: Mapping[str, Any], folder: str) -> Outcome:
    """Describe one launch in this process, which is started for it."""
    from mindspeed_mm.utils import log
    from mindspeed_mm.utils.errors import MMError

    notices: list[str] = []
    log.logger.handlers[:] = [_Keeper(notices)]
    entry = re.sub(r"^\./", "", launch["entry"])
    if not (ROOT / entry).is_file():
        return Outcome(f"{entry} is not there yet")
    os.chdir(folder)
    processes = str(world_size(launch["launcher_words"]))
    os.environ.update(launch["environment"], RANK="0", LOCAL_RANK="0", WORLD_SIZE=processes)
    try:
        describe(entry, list(launch["words"]))
    except MMError as error:
        return Outcome(str(error), tuple(notices))
    return Outcome(None, tuple(notices))


class _Keeper(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def first_sentence(refusal: str) -> str:
    """The first line of a refusal, up to what to write instead."""
    return refusal.splitlines()[0]


def reason(refusal: str) -> str:
    """What a refusal is about, without the names of files and the values found."""
    line = re.sub(r"^(\./)?\S+\.(json|yaml)[^:]*: ", "", first_sentence(refusal))
    line = re.sub(r"^'[\w.]+' is \S+; ", "", line)
    return re.sub(r"^--[\w-]+ .*?: ", "", line)


def main() -> int:
    """Print the table; the exit status is 0 whatever was accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of launches.json and files/")
    parser.add_argument("--notices", action="store_true", help="print the notices of accepted launches")
    options = parser.parse_args()
    launches: dict[str, list[dict[str, Any]]] = json.loads((options.folder / "launches.json").read_text())
    found = outcomes(options.folder / "files", launches)
    for script, outcome in found.items():
        print(f"{script}: {'accepted' if outcome.refusal is None else first_sentence(outcome.refusal)}")
    refused = Counter(reason(outcome.refusal) for outcome in found.values() if outcome.refusal is not None)
    print(f"\n{len(found) - refused.total()} of {len(found)} accepted")
    for why, count in refused.most_common():
        print(f"{count:4} {why}")
    if options.notices:
        scripts_of: dict[str, list[str]] = {}
        for script, outcome in found.items():
            for line in outcome.notices if outcome.refusal is None else ():
                scripts_of.setdefault(line, []).append(script)
        print()
        for line, scripts in scripts_of.items():
            print(f"{len(scripts):4} {line}   [{scripts[0]}]")
    return 0


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
