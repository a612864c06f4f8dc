"""examples of generation models: files that the schemas take without a word, flags that parse, paths that expand.

A script runs with a torchrun that only writes down its words. The pipelines are folders with tiny transformers'
configurations, and no weights.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.configs.files import read_json
from mindspeed_mm.configs.fsdp2_config import load_fsdp2_config
from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.configs.sora_inference import SoRAInferenceConfig
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.paths import find_modules
from mindspeed_mm.models.generation.predictor.family import families
from mindspeed_mm.models.generation.sora_model import SoRAModel, block_paths
from mindspeed_mm.tasks.train.generation import SORA
from mindspeed_mm.utils.files import write_json
from mindspeed_mm.utils.log import forget_notices, logger
from tests.e2e.test_examples import EXAMPLES, default_of, in_root, launched
from tests.support.launch import ROOT
from tests.support.predictors import cases
from tests.support.runs import described_args

COMMON = "source examples/sora_common.sh"
SCRIPTS = sorted(path for path in EXAMPLES.glob("*/*.sh") if COMMON in path.read_text(encoding="utf-8"))
NAMES = [f"{path.parent.name}/{path.name}" for path in SCRIPTS]
FOLDERS = sorted({path.parent for path in SCRIPTS})
MODELS = sorted(path for folder in FOLDERS for path in [*folder.glob("model*.json"), *folder.glob("*/model*.json")])
INFERENCE = sorted(path for folder in FOLDERS for path in folder.glob("inference_model*.json"))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    lines: list[str] = []
    forget_notices()
    monkeypatch.setattr(logger, "handle", lambda record: lines.append(record.getMessage()))
    return lines


def name_of(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


@functools.cache
def tiny_config(family: str, task: str) -> dict[str, Any]:
    """Of the family's transformer for the task, else for another one."""
    known = [case for name, case in cases().values() if name == family]
    return dict(next((case for case in known if case.task == task), known[0]).config)


def pipeline(folder: Path, family: str, task: str) -> Path:
    """A pipeline's folder with a tiny transformer's configuration."""
    class_name = families()[family].model_class_name
    for part in ("transformer", "transformer_2"):
        (folder / part).mkdir(parents=True)
        write_json(folder / part / "config.json", {"_class_name": class_name, **tiny_config(family, task)})
    for part in ("vae", "text_encoder", "image_encoder"):
        (folder / part).mkdir()
    write_json(folder / "image_encoder" / "config.json", {})
    write_json(folder / "model_index.json", {})
    return folder


def with_pipeline(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """model.json of a tiny pipeline in place of the published one."""
    model = SoRAModelConfig.from_dict(content)
    made = pipeline(folder, str(model.predictor.model_id), str(model.task))
    other = content["predictor"].get("from_pretrained")
    predictor = {**content["predictor"], **({"from_pretrained": str(made / Path(other).name)} if other else {})}
    return {**content, "init_from_diffusers": str(made), "predictor": predictor}


def test_there_are_examples() -> None:
    assert {folder.name for folder in FOLDERS} >= {"wan2.1", "wan2.2", "hunyuanvideo_1.5", "flux", "qwenimage"}
    assert len(NAMES) == 13


@pytest.mark.parametrize("path", MODELS, ids=name_of)
def test_a_model_json_is_taken_without_a_word(path: Path, tmp_path: Path, said: list[str]) -> None:
    """It describes a model that builds, and fsdp2_config.yaml names all of its blocks."""
    content = read_json(path)
    with build_context(BuildContext(defer_weights=True)):
        model = SoRAModel(with_pipeline(content, tmp_path / "pipeline"))
    assert model.source is not None and model.family.task == content["task"]
    folder = path.parent if (path.parent / "fsdp2_config.yaml").is_file() else path.parent.parent
    config = load_fsdp2_config(folder / "fsdp2_config.yaml")
    wrapped = find_modules(model, config.sub_modules_to_wrap or (), where=path.name)
    blocks = find_modules(model, [f"predictor.{paths}" for paths in block_paths(model.predictor)], where=path.name)
    repeated = [b for b in blocks if re.search(r"(blocks|transformer_blocks)\.\d+$", b) and "refiner" not in b]
    assert wrapped and set(wrapped) == set(repeated)
    assert set(find_modules(model, config.recompute_modules or (), where=path.name)) == set(wrapped)
    assert said == []


@pytest.mark.parametrize("path", INFERENCE, ids=name_of)
def test_an_inference_file_is_taken_without_a_word(path: Path, said: list[str]) -> None:
    """It samples the model that is trained, in a size that it takes."""
    config = SoRAInferenceConfig.from_dict(read_json(path), str(path))
    sampling = config.sampling
    for file in filter(None, (sampling.prompt, sampling.image)):
        assert (ROOT / file).is_file() and (ROOT / file).read_text(encoding="utf-8").strip()
    assert (sampling.image is not None) == (config.model.task in ("i2v", "ti2v"))
    trained = [SoRAModelConfig.from_dict(read_json(other)) for other in MODELS if other.parent == path.parent]
    known = [(m.init_from_diffusers, m.task, m.predictor.model_id) for m in trained]
    assert (config.model.init_from_diffusers, config.model.task, config.model.predictor.model_id) in known
    rule = rule_of(read_json(path))
    assert sampling.pipeline_config.input_size is not None and rule.fits(*sampling.pipeline_config.input_size)
    assert said == []


def rule_of(content: dict[str, Any]) -> Any:
    """What the published model asks of shapes: strides of the family's autoencoder."""
    family = families()[content["predictor"]["model_id"]]
    temporal, spatial = family.defaults.strides
    if "5B" in content["init_from_diffusers"]:
        spatial = 16  # of Wan 2.2's own autoencoder
    patch = family("t2v", published_patch(family.names[0])).spatial_patch
    from mindspeed_mm.data.generation.rule import GenerationRule

    return GenerationRule(temporal, spatial * patch)


def published_patch(name: str) -> dict[str, Any]:
    return {"patch_size": {"wan": (1, 2, 2), "hunyuanvideo15": 1}.get(name, 2)}


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_short_and_its_readme_names_it(name: str) -> None:
    script = EXAMPLES / name
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 30 and os.access(script, os.X_OK)
    readme = (script.parent / "README.md").read_text(encoding="utf-8")
    assert script.name in readme and default_of(script, "HF_PATH").removeprefix("./ckpt/hf_path/") in readme
    for path in re.findall(r"examples/[\w./-]+\w", readme):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("expert", ["high", "low"])
@pytest.mark.parametrize("name", NAMES)
def test_a_launch_is_taken_without_a_word(
    name: str, expert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    script = EXAMPLES / name
    has_experts = "EXPERT" in script.read_text(encoding="utf-8")
    if expert == "low" and not has_experts:
        return
    model_file = re.search(r"MM_MODEL:-\$EXAMPLE/(\S+)\}", script.read_text(encoding="utf-8"))
    assert model_file is not None
    content = read_json(script.parent / model_file[1].replace("$EXPERT", expert))
    model = SoRAModelConfig.from_dict(content)
    made = pipeline(tmp_path / "pipeline", str(model.predictor.model_id), str(model.task))
    rows = tmp_path / "rows" / "captions.jsonl"
    rows.parent.mkdir()
    rows.write_text("{}\n")
    variables = {"HF_PATH": str(made), "DATA_PATH": str(rows), "SAVE_PATH": str(tmp_path / "run"), "EXPERT": expert}
    found = launched(name, tmp_path, "--lr", "3e-5", "--min-lr", "0", **variables)
    assert found.entry == "pretrain_sora.py" and (ROOT / found.entry).is_file()
    beside = [default_of(other, "HF_PATH") for other in SCRIPTS if other.parent == script.parent]
    assert content["init_from_diffusers"] in beside
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = in_root(lambda words: described_args(words, SORA), found.words)
    assert (args.lr, args.data_parallel_size, args.save) == (3e-5, 2, str(tmp_path / "run"))
    described = SoRAModelConfig.from_dict(args.mm.model)
    assert described.init_from_diffusers == str(made)
    if expert == "low":
        assert described.predictor.from_pretrained == str(made / "transformer_2")
        assert described.diffusion.min_timestep_boundary > 0
    data = GenerationDataConfig.from_dict(args.mm.data)
    assert data.dataset_param.basic_parameters.data_path == [str(rows)]
    if data.dataset_param.dataset_type != "feature":
        param = data.dataset_param.preprocess_parameters
        assert rule_of({**content}).fits(param.num_frames, param.max_height, param.max_width)
    assert said == []


def test_features_are_made_by_the_model_that_is_trained(said: list[str]) -> None:
    folder = EXAMPLES / "wan2.1"
    for path in (folder / "feature_extract").glob("model_*.json"):
        trained, extracts = (SoRAModelConfig.from_dict(read_json(p)) for p in (folder / path.name, path))
        assert (trained.load_video_features, trained.load_text_features) == (True, True)
        assert (extracts.load_video_features, extracts.load_text_features) == (False, False)
        assert (trained.ae, trained.init_from_diffusers) == (extracts.ae, extracts.init_from_diffusers)
    data = GenerationDataConfig.from_dict(read_json(folder / "feature_extract" / "data.json"))
    assert data.dataset_param.dataset_type == "t2v" and said == []


def table() -> str:
    """The table of examples/README.md, from the folders."""
    lines = []
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        found = re.search(r"MM_MODEL:-\$EXAMPLE/(\S+)\}", text)
        assert found is not None
        task = read_json(script.parent / found[1].replace("$EXPERT", "high"))["task"]
        name = default_of(script, "HF_PATH").removeprefix("./ckpt/hf_path/")
        lines.append(f"| [{script.parent.name}]({script.parent.name}) | `{script.name}` | `{name}` | {task} |\n")
    return "".join(lines)


def test_the_table_is_that_of_the_folders() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert table() in text, f"write into examples/README.md:\n{table()}"
