"""Write docs/configuration.md from the schema: every flag and every key, with type, default and meaning.

`python scripts/make_configuration_docs.py` writes the file; `--check` only reports whether it is up to date.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mindspeed_mm.configs import (  # noqa: E402
    data_rules,
    generation_rules,
    model_rules,
    sora_rules,
    trainer_keys,
    vlm_inference,
    vlm_rules,
)
from mindspeed_mm.configs.data_config import DataConfig  # noqa: E402
from mindspeed_mm.configs.dialects import llm_fsdp2  # noqa: E402
from mindspeed_mm.configs.environment import VARIABLES  # noqa: E402
from mindspeed_mm.configs.flags import GROUPS  # noqa: E402
from mindspeed_mm.configs.flags.spec import BackendName, Flag, flags_of  # noqa: E402
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config  # noqa: E402
from mindspeed_mm.configs.generation_data import GenerationDataConfig  # noqa: E402
from mindspeed_mm.configs.llm_config import LlmConfig  # noqa: E402
from mindspeed_mm.configs.model_config import TransformersModelConfig  # noqa: E402
from mindspeed_mm.configs.older_keys import FLAGS_OF_OTHERS, OLDER, SCRIPTS_HERE, Fate  # noqa: E402
from mindspeed_mm.configs.published import NoEffect, Refused, published_paths  # noqa: E402
from mindspeed_mm.configs.sections import Section, join, key_paths, section_class  # noqa: E402
from mindspeed_mm.configs.serving import ServeFlags  # noqa: E402
from mindspeed_mm.configs.sora_config import SoRAModelConfig  # noqa: E402
from mindspeed_mm.configs.tools_config import ProfilerFile, ToolsConfig  # noqa: E402
from mindspeed_mm.configs.trainer_config import TrainerConfig  # noqa: E402
from mindspeed_mm.configs.vlm_config import VLMModelConfig  # noqa: E402
from mindspeed_mm.configs.vlm_evaluation import BenchmarkFlags  # noqa: E402
from mindspeed_mm.configs.vlm_inference import AnswerFlags, AnswerKeys, EvaluationKeys, InferenceKeys  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"

INTRODUCTION = """# Configuration

<!-- Made by scripts/make_configuration_docs.py from mindspeed_mm/configs: change the schema, then run the script. -->

A run is described by the flags of its launch command and by up to four files that flags name:

| file | flag | describes |
|---|---|---|
| `model.json` | `--mm-model` | which model is trained, what of it is frozen, which loss |
| `data.json` | `--mm-data` | which rows, how they are read, how they are batched |
| `tools.json` | `--mm-tool` | profiler and memory snapshots; may be `{}` or absent |
| `fsdp2.yaml` | `--fsdp2-config-path` | how the model is sharded, recomputed, prefetched, offloaded |

A run trains with one of two backends. With `--use-torch-fsdp2` the transformers model itself is trained, sharded as
fsdp2.yaml says (`pretrain_transformers.py`, `pretrain_vlm.py`). Without it the model is built of megatron-core's
modules and spread by tensor, pipeline and data parallelism: the Megatron backend (`pretrain_vlm.py`). Where no backend
is named, both are meant. `pretrain_sora.py` trains models that make images and videos with FSDP2; the flag may be left
out there.

All of it may be written in one YAML file instead, see [One YAML file](#one-yaml-file).

In a script, `get_args()` gives the flags, and `get_args().mm.model`, `.mm.data`, `.mm.tool` the three JSON files.
A `.yaml` file in place of a JSON file is read under its top-level key `model`, `data` or `tool`.
What the launch has described stays as it is: another value that a script writes there and has not put back when its
callback returns is an error that says where to give it, and so is a write to a file of this project's own schema. Flags
of the script's own, what `args_defaults` stores beside flags, and new attributes may be written; a copy may be changed
freely.

Rules that apply everywhere:

* An unknown key or flag is an error that names the file (or flag), the key and the nearest valid name. All faults of
  a file are reported at once. A key written twice in one object is an error.
* A published key or flag that has no effect here is accepted, and logged once with the reason. One whose neglect would
  change what is trained, and that is not there yet, is an error. For one of an older release the message says what
  became of it, and for a flag of another script to which one it belongs: see
  [Keys and flags of older releases](#keys-and-flags-of-older-releases).
* `true`/`false`, `on`/`off`, `yes`/`no`, `1`/`0`, also as text and in any case, are booleans; anything else is refused
  where a boolean is expected. `"False"` is false.
* `1e-5`, `1E5` and numbers written as text are numbers where a number is expected.
* `null`, and the words `None` and `null`, mean null; where a key has no null of its own they mean its default.
* Files are UTF-8, whatever the locale, with or without a byte-order mark.
* `--micro_batch_size` is `--micro-batch-size`; `--flag=value` is `--flag value`; flags are never abbreviated. A switch
  may be followed by `true` or `false`.
* A model of your own (a `plugin` in model.json, or a script of your own) may have keys of its own in model.json; only
  one that is close to a known key is mentioned.
"""


YAML_CHAPTER = """## One YAML file

`torchrun … pretrain_transformers.py run.yaml [section.key=value …] [--flag …]` (or `pretrain_vlm.py`, or
`train_fsdp2.py`): the file comes right after the script's name, and words and flags after it take precedence. A value
in such a word is YAML: `gpt_args.lr=2e-5`, `"fsdp2.recompute_modules=['model.layers.{*}']"`.

| top-level key | content |
|---|---|
| `gpt_args`, `lora_args` | flags by their names, with underscores; objects inside them only group |
| `model` | that of `model.json` |
| `data` | that of `data.json` |
| `MM_TOOL_PATH`, or `tool` | path of `tools.json`, or its content |
| `fsdp2` | that of `fsdp2.yaml`, in place of `gpt_args.fsdp2_config_path` |
| `working_directory` | where relative paths start; absent: the current folder. A run writes it into its run.yaml |
| a key with an anchor | a value for other places: `SAVE_PATH: &SAVE_PATH runs/mine`, and there `*SAVE_PATH` |

A list gives a flag all of its values, and so does text with commas where a flag takes several; `true` and `false` turn
a switch on and off, and `null` means a flag's default. A list on the command line takes the place of the file's.

```yaml
MM_TOOL_PATH: ./configs/tools.json
HF_MODEL_LOAD_PATH: &HF_MODEL_LOAD_PATH ./ckpt/hf_path/Qwen3-VL-8B-Instruct
gpt_args:
  use_torch_fsdp2: true
  fsdp2_config_path: ./fsdp2.yaml
  micro_batch_size: 1
  global_batch_size: 16
  lr: 1e-5
  train_iters: 10000
  bf16: true
model:
  init_from_hf_path: *HF_MODEL_LOAD_PATH
data:
  dataset_param:
    dataset_type: huggingface
    basic_parameters: {dataset: ./data/train.json, dataset_dir: ./data}
    preprocess_parameters: {model_name_or_path: *HF_MODEL_LOAD_PATH}
```
"""


TRAINER_CHAPTER = """## The YAML file of mindspeed_mm/fsdp/train/trainer.py

`torchrun … mindspeed_mm/fsdp/train/trainer.py run.yaml [section.key=value …] [--flag …]`: the sections `parallel`,
`model`, `data`, `features`, `training` and `tools` of MindSpeed-MM's native FSDP2 backend. They describe the same run
as flags and files, and any of the entry scripts takes any such file. `data` and `tools` have the keys of data.json and
tools.json. The table says which flag or key each becomes, with the default of this file.

Module paths are patterns as in fsdp2.yaml. `model.freeze` and `ep_plan.apply_modules` must match; entries of
`fsdp_plan.apply_modules` and `recompute_plan.apply_modules` that match nothing are left out, with a notice
(`ignore_missing_modules`). `plugin` entries under `mindspeed_mm/fsdp/` are built in; others are imported, a folder with
all files in it.
"""


LLM_CHAPTER = """## The YAML file of train_fsdp2.py

`torchrun … train_fsdp2.py run.yaml [section.key=value …] [--flag …]`: the sections `model`, `parallel`, `data` and
`training` of MindSpeed-LLM's FSDP2 backend. They describe the same run as flags and files, and any of the entry
scripts takes any such file. Flags of this page may follow and take precedence (`--eval-interval 100`, `--overwrite`).

```yaml
model:
  model_id: gpt_oss
  model_name_or_path: ./ckpt/hf_path/gpt-oss-20b-bf16
parallel:
  fsdp_size: 8
  fsdp_modules: ["model.layers.{*}", model.embed_tokens, lm_head]
  recompute: True
data:
  dataset: {file_name: ./data/rows.json, formatting: alpaca}
  cutoff_len: 2048
training:
  output_dir: ./output
  lr: 1e-05
  max_steps: 1000
```

`model.model_id` is looked up in `ModelHub`, where users register classes of their own (by `model.plugin`, or in a
script of their own: [adding_a_model.md](adding_a_model.md)). Relative paths start at the working folder; those of
`data.dataset` and of dataset_info.json at `data.dataset_dir` first. A data set is a name of dataset_info.json, an
entry as that file has them, or a data file. The templates `gpt` and `gpt_oss` are the chat template of the model's
directory.

`training.calculate_per_token_loss: false`, its default, averages the means of micro-batches, so the loss depends on
how a step is split into them; true is what every other run does. Rows are tokenised while training goes on, without a
pass over the data before. `data.tokenized_path` names a folder for tokens made before training; packed rows whose
length is given in epochs need them, and put them into `tokens/` of the output folder where it is absent (extra
`tables`).

`data.data_manager_type: mg` reads documents instead of rows, for pretraining (data.json's `dataset_type: corpus`, see
[data.md](data.md#documents-for-pretraining); extra `megatron`). Their index goes to `data.tokenized_path`, or into
`tokens/` of the output folder; `training.stage` may be left out.
"""


ANSWERS_CHAPTER = """## inference_vlm.py and mindspeed-mm chat

See [inference.md](inference.md). Of the flags above, `--use-torch-fsdp2`, `--fsdp2-config-path`, `--trust-remote-code`,
`--micro-batch-size` (the same as `--batch-size`), `--bf16`, `--fp16`, the tensor- and pipeline-parallel sizes and those
of collectives count here, too; any others are accepted, with a notice.
"""


EVALUATION_CHAPTER = """## evaluate_vlm.py

See [evaluation.md](evaluation.md). It has the flags of inference_vlm.py except those of a prompt, and these:
"""


SERVING_CHAPTER = """## mindspeed-mm serve

See [serving.md](serving.md). It has the flags of inference_vlm.py except those of prompts, rows and outputs, and these:
"""


STRUCTURE_WORDS = """Without a directory and without `config`, `predictor` may say the structure in published words
(`model_type`, `hidden_size`, `num_layers`, `num_heads`, `in_dim` …): families `wandit` and `hunyuanvideo15dit`
translate them. A structure alone has no weights: they come from `--load`, or are random with `train_from_scratch`.
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def flag_row(item: Flag) -> list[str]:
    """Return the table row of one flag."""
    names = ", ".join(f"`{name}`" for name in (*item.spellings, *item.off_spellings))
    default = "" if item.default in (None, []) or item.kind is bool else f"{item.default}"
    if item.kind is bool and item.spellings and item.default:
        default = "on"
    only = {("fsdp2",): " (FSDP2 only)", ("ptd",): " (Megatron backend only)"}.get(item.backends, "")
    return [names, item.type_words, default, item.help + only]


def flag_chapters() -> str:
    """Return the tables of flags that a backend honours, then those without effect, then the refused ones."""
    parts = ["## Flags\n"]
    for group in GROUPS:
        rows = [flag_row(item) for item in flags_of(group) if item.backends]
        if rows:
            title = flags_of(group)[0].group
            parts.append(f"### {title}\n\n" + table(("flag", "type", "default", "meaning"), rows))
    every = [item for group in GROUPS for item in flags_of(group)]
    parts.append(
        "### Accepted, without effect here\n\nEach is logged once, with the reason.\n\n"
        + table(("reason", "backend", "flags"), _by_reason_and_backend([(i.no_effect, _names(i)) for i in every]))
    )
    parts.append(
        "### Not there yet\n\nGiving one is an error, because leaving it out would change the result.\n\n"
        + table(("what to do", "backend", "flags"), _by_reason_and_backend([(i.refused, _names(i)) for i in every]))
    )
    return "\n".join(parts)


def _names(item: Flag) -> str:
    return f"`{item.spelling}`"


BACKEND_WORDS: dict[tuple[BackendName, ...], str] = {
    ("fsdp2",): "FSDP2",
    ("ptd",): "Megatron",
    ("fsdp2", "ptd"): "both",
}


def _by_reason_and_backend(pairs: Sequence[tuple[Mapping[BackendName, str], str]]) -> list[list[str]]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for reasons, name in pairs:
        for reason in dict.fromkeys(reasons.values()):
            backend = BACKEND_WORDS[tuple(backend for backend, given in reasons.items() if given == reason)]
            grouped.setdefault((reason, backend), []).append(name)
    return [[reason, backend, ", ".join(names)] for (reason, backend), names in grouped.items()]


def _by_reason(pairs: Sequence[tuple[str | None, str]]) -> list[list[str]]:
    grouped: dict[str, list[str]] = {}
    for reason, name in pairs:
        grouped.setdefault(str(reason), []).append(name)
    return [[reason, ", ".join(names)] for reason, names in grouped.items()]


def type_words(annotation: Any) -> str:
    """Say an annotation in a few words."""
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is typing.Annotated:
        return type_words(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_words(part) for part in typing.get_args(annotation)))
    if typing.get_origin(annotation) is Literal:
        return ", ".join(str(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) is list:
        return "list of " + type_words(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is dict:
        return "object"
    if typing.get_origin(annotation) is tuple:
        return "list of " + type_words(typing.get_args(annotation)[0])
    words = {bool: "boolean", int: "whole number", float: "number", str: "text"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def section_rows(cls: type[Section], prefix: str = "") -> list[list[str]]:
    """Return the table rows of a section's keys, and of the sections inside it."""
    rows = []
    for name, info in cls.model_fields.items():
        path, inner = join(prefix, name), section_class(info.annotation)
        if (listed := _listed_section(info.annotation)) is not None:
            rows.append([f"`{path}`", "object, or list of objects", "", info.description or ""])
            rows += section_rows(listed, path)
            continue
        if inner is not None:
            rows.append([f"`{path}`", "object", "", info.description or ""])
            rows += section_rows(inner, path)
            continue
        default = "required" if info.is_required() else _default_words(info.default)
        rows.append([f"`{path}`", type_words(info.annotation), default, info.description or ""])
    return rows


def _listed_section(annotation: Any) -> type[Section] | None:
    """Return the section class inside a list; None for everything else."""
    if typing.get_origin(annotation) is not list:
        return None
    [item] = typing.get_args(annotation)
    return item if isinstance(item, type) and issubclass(item, Section) else None


def _documented_paths(cls: type[Section]) -> set[str]:
    """Dotted paths of the keys that are honoured, those of objects in lists too."""
    paths = set(key_paths(cls))
    for name, info in cls.model_fields.items():
        listed = _listed_section(info.annotation)
        paths |= {f"{name}.{key}" for key in key_paths(listed)} if listed is not None else set()
    return paths


def _default_words(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def file_chapter(
    name: str,
    cls: type[Section],
    kind: str | None = None,
    rules: Sequence[NoEffect] = (),
    refused: Sequence[Refused] = (),
) -> str:
    """Return the chapter of one file."""
    about = (cls.__doc__ or "").strip().split("\n\n")
    parts = [f"## {name}\n", *(f"{' '.join(part.split())}\n" for part in about)]
    parts.append(table(("key", "type", "default", "meaning"), section_rows(cls)))
    if refused:
        parts.append("Values that are refused:\n")
        parts.append(table(("key", "what to do"), [[f"`{rule.path}`", rule.sentence] for rule in refused]))
    if kind and rules:
        paths = sorted(published_paths(kind) - _documented_paths(cls))
        pairs = []
        for path in paths:
            rule = next(rule for rule in rules if re.fullmatch(rule.pattern, path))
            if rule is not rules[-1] and not any(path == item.path for item in refused):
                pairs.append((rule.why, f"`{path}`"))
        parts.append(
            "Published keys that are accepted and have no effect here (any other published key belongs to another "
            "kind of run and is accepted too):\n"
        )
        parts.append(table(("reason", "keys"), _by_reason(pairs)))
    return "\n".join(parts)


def trainer_chapter() -> str:
    """Return the chapter of the multimodal YAML file."""
    answered = {rule.path for rule in trainer_keys.TRAINER_REFUSED}
    pairs = [
        (next(rule.why for rule in trainer_keys.TRAINER_IDLE if re.fullmatch(rule.pattern, key)), f"`{key}`")
        for key in sorted(trainer_keys.PUBLISHED - answered)
    ]
    return "\n".join(
        [
            TRAINER_CHAPTER,
            table(("key", "type", "default", "becomes"), section_rows(TrainerConfig)),
            "Values that are refused:\n",
            table(("key", "what to do"), [[f"`{rule.path}`", rule.sentence] for rule in trainer_keys.TRAINER_REFUSED]),
            "Keys that are accepted and have no effect here:\n",
            table(("reason", "keys"), _by_reason(pairs)),
        ]
    )


def llm_chapter() -> str:
    """Return the chapter of train_fsdp2.py's file: its keys, what each is called elsewhere, and which are refused."""
    keys = [path for path in key_paths(LlmConfig) if "." in path]
    called: dict[str, list[str]] = {}
    for name, key in llm_fsdp2.NAMES.items():
        called.setdefault(key, []).append(f"`{name}`")
    pairs = []
    for key in keys:
        rule = next((rule for rule in llm_fsdp2.NO_EFFECT if re.fullmatch(rule.pattern, key)), None)
        if rule is not None:
            pairs.append((rule.why, f"`{key}`"))
    return "\n".join(
        [
            LLM_CHAPTER,
            table(("key", "type", "default", "meaning"), section_rows(LlmConfig)),
            "What keys with another name become:\n",
            table(("key", "here"), [[f"`{key}`", ", ".join(called[key])] for key in keys if key in called]),
            "Values that are refused:\n",
            table(("key", "what to do"), [[f"`{rule.path}`", rule.sentence] for rule in llm_fsdp2.REFUSED]),
            "Keys that are accepted, with a notice where a value has no effect:\n",
            table(("reason", "keys"), _by_reason(pairs)),
        ]
    )


def answers_chapter() -> str:
    """Return the chapter of inference_vlm.py: its flags, the keys of model.json that it reads, those of a YAML file."""
    head = ("key", "type", "default", "meaning")
    idle = [(rule.why, f"`{path}`") for path, rule in vlm_inference.idle_keys_of_models()]
    return "\n".join(
        [
            ANSWERS_CHAPTER,
            table(("flag", "type", "default", "meaning"), [flag_row(item) for item in flags_of(AnswerFlags)]),
            "Keys of model.json, beside those of the model:\n",
            table(head, section_rows(AnswerKeys)),
            "Values that are refused:\n",
            table(
                ("key", "what to do"), [[f"`{rule.path}`", rule.sentence] for rule in vlm_inference.REFUSED_ANSWER_KEYS]
            ),
            "Published keys that are accepted and have no effect here:\n",
            table(("reason", "keys"), _by_reason(idle)),
            "The section `inference` of a YAML file, `python inference_vlm.py run.yaml [--flag …]`:\n",
            table(head, section_rows(InferenceKeys)),
        ]
    )


def evaluation_chapter() -> str:
    """Return the chapter of evaluate_vlm.py: what it has beside inference_vlm.py."""
    answers = {item.name: item for item in flags_of(AnswerFlags)}
    own = [item for item in flags_of(BenchmarkFlags) if item.help != getattr(answers.get(item.name), "help", None)]
    return "\n".join(
        [
            EVALUATION_CHAPTER,
            table(("flag", "type", "default", "meaning"), [flag_row(item) for item in own]),
            "Keys of model.json, beside those of inference_vlm.py:\n",
            table(("key", "type", "default", "meaning"), section_rows(EvaluationKeys)),
        ]
    )


def serving_chapter() -> str:
    """Return the chapter of mindspeed-mm serve: what it has beside inference_vlm.py."""
    answers = {item.name for item in flags_of(AnswerFlags)}
    own = [item for item in flags_of(ServeFlags) if item.name not in answers]
    return "\n".join([SERVING_CHAPTER, table(("flag", "type", "default", "meaning"), [flag_row(item) for item in own])])


FATES: dict[Fate, str] = {
    "write": "refused, unless its value has no consequence",
    "absent": "refused, unless its value has no consequence",
    "built in": "accepted, and logged once",
}


def older_chapter() -> str:
    """Return the chapter of keys and flags of older releases, and of other scripts' flags."""
    files = {"model": "model.json", "data": "data.json", "fsdp2": "fsdp2.yaml", "flag": "flags"}
    rows = []
    for row in OLDER:
        flags = row.kind == "flag"
        names = ", ".join(f"`--{path.replace('_', '-')}`" if flags else f"`{path}`" for path in row.paths())
        own = row.of == "an older release"
        rows.append([files[row.kind], names, row.became if own else f"of {row.of}: {row.became}", FATES[row.fate]])
    others = [
        [
            script if script in SCRIPTS_HERE or not script.endswith(".py") else f"{script} (not there yet)",
            ", ".join(f"`--{name}`" for name in names.split()),
        ]
        for script, names in FLAGS_OF_OTHERS.items()
    ]
    return "\n".join(
        [
            "## Keys and flags of older releases\n",
            "What became of them. One that would change what is trained is refused with what to write; `null`, `false` "
            "and 0 ask for nothing where the key is a switch or a number that turns something on.\n",
            table(("file", "keys", "what became of them", "here"), rows),
            "Flags of other scripts and commands, which a training names them for:\n",
            table(("script or command", "flags"), others),
        ]
    )


def environment_chapter() -> str:
    """Return the chapter of environment variables."""
    rows = [[f"`{name}`", item.meaning or f"no effect here: {item.no_effect}"] for name, item in VARIABLES.items()]
    return "\n".join(
        [
            "## Environment variables\n",
            "Those of published launch scripts and our own. A variable that starts with `MM_` and looks like one of "
            "ours is mentioned at the start.\n",
            table(("variable", "meaning"), rows),
        ]
    )


def make_page() -> str:
    """Return the whole page."""
    chapters = [
        INTRODUCTION,
        flag_chapters(),
        file_chapter("fsdp2.yaml", Fsdp2Config),
        file_chapter(
            "model.json with FSDP2",
            TransformersModelConfig,
            "model",
            model_rules.IDLE_MODEL_KEYS,
            model_rules.REFUSED_MODEL_KEYS,
        ),
        file_chapter(
            "model.json on the Megatron backend",
            VLMModelConfig,
            "model",
            vlm_rules.IDLE_VLM_KEYS,
            vlm_rules.REFUSED_VLM_KEYS,
        ),
        file_chapter("data.json", DataConfig, "data", data_rules.IDLE_DATA_KEYS, data_rules.REFUSED_DATA_KEYS),
        file_chapter(
            "model.json of models that make images and videos",
            SoRAModelConfig,
            "model",
            sora_rules.IDLE_SORA_KEYS,
            sora_rules.REFUSED_SORA_KEYS,
        ),
        STRUCTURE_WORDS,
        file_chapter(
            "data.json of models that make images and videos",
            GenerationDataConfig,
            "data",
            generation_rules.IDLE_GENERATION_DATA_KEYS,
            generation_rules.REFUSED_GENERATION_DATA_KEYS,
        ),
        file_chapter("tools.json", ToolsConfig),
        file_chapter("profiler_config.json", ProfilerFile),
        answers_chapter(),
        evaluation_chapter(),
        serving_chapter(),
        YAML_CHAPTER,
        llm_chapter(),
        trainer_chapter(),
        older_chapter(),
        environment_chapter(),
    ]
    return "\n".join(chapters)


def main(argv: Sequence[str]) -> int:
    """Write the page, or check it; return the exit status."""
    page = make_page()
    if "--check" in argv:
        fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page
        print(f"{PAGE} is {'up to date' if fresh else 'out of date: run scripts/make_configuration_docs.py'}")
        return 0 if fresh else 1
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
