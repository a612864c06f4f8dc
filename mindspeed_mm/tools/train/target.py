"""What `mindspeed-mm train` is to start: a YAML file, an entry script, a launch script of bash, or a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.run_folder import RUN_FILE, read_record
from mindspeed_mm.configs.files import YAML_SUFFIXES, read_yaml
from mindspeed_mm.configs.other_scripts import describes_generation
from mindspeed_mm.configs.scalars import read_bool
from mindspeed_mm.configs.working_directory import with_absolute_paths, working_directory_of
from mindspeed_mm.configs.yaml_run import dialects
from mindspeed_mm.utils.errors import ConfigError, did_you_mean

#: the entry scripts, by the paths that launches name, and the modules that they run
ENTRY_MODULES: Mapping[str, str] = {
    "pretrain_vlm.py": "mindspeed_mm.entry.pretrain_vlm",
    "pretrain_transformers.py": "mindspeed_mm.entry.pretrain_transformers",
    "pretrain_sora.py": "mindspeed_mm.entry.pretrain_sora",
    "train_fsdp2.py": "mindspeed_mm.entry.train_fsdp2",
    "mindspeed_mm/fsdp/train/trainer.py": "mindspeed_mm.entry.trainer",
}
_SUFFIXES = ("a run's .yaml file", "an entry script (.py)", "a launch script (.sh)", "a run folder")


@dataclass(frozen=True)
class LaunchTarget:
    """What is started.

    Attributes:
        words: what every process runs, after the Python interpreter: `-m` and a module, or a script, and its words.
        bash: a launch script, which names the processes' program itself; None: it isn't one.
        processes: of this machine, as the run of a run folder had them; None: nothing says.
        folder: where the words are read, of a run folder; None: the current one.
    """

    words: tuple[str, ...] = ()
    bash: str | None = None
    processes: int | None = None
    folder: str | None = None


def find_target(name: str, words: Sequence[str]) -> LaunchTarget:
    """Return what a word of the command line names.

    Args:
        name: a path, or the name of one of our entry scripts, which need not lie in the current folder.
        words: those after it, which are passed on.

    Raises:
        ConfigError: it is none of these, or isn't there.
    """
    path = Path(name)
    if path.is_dir() and (path / RUN_FILE).is_file():
        return _of_run_folder(path, words)
    if path.name == RUN_FILE and path.is_file() and read_record(path.parent):
        return _of_run_folder(path.parent, words)
    if path.suffix.lower() in YAML_SUFFIXES:
        return LaunchTarget(("-m", ENTRY_MODULES[entry_of_yaml(str(path), words)], str(path), *words))
    if path.suffix == ".sh" and path.is_file():
        return LaunchTarget(tuple(words), bash=str(path))
    module = ENTRY_MODULES.get(name.removeprefix("./"))
    if path.suffix == ".py" and (path.is_file() or module):
        own = path.is_file() and not _is_ours(path)
        return LaunchTarget((name, *words) if own or module is None else ("-m", module, *words))
    if path.is_dir():
        raise ConfigError(f"'{name}' is a folder without {RUN_FILE}, so it is no run folder; expected {_expected()}")
    hint = did_you_mean(name, ENTRY_MODULES) or f"; expected {_expected()}"
    raise ConfigError(f"'{name}' is no file that starts a run{'' if path.exists() else ', and is not there'}{hint}")


def _of_run_folder(folder: Path, words: Sequence[str]) -> LaunchTarget:
    """What started a run, with its description, on as many processes of this machine."""
    record = read_record(folder)
    start = (record.get("starts") or [{}])[-1]
    file = str(folder / RUN_FILE)
    program = start.get("program") or ["-m", ENTRY_MODULES[entry_of_yaml(file, words)]]
    directory = working_directory_of(file) or start.get("working_directory")  # a file of one's own names none
    if directory is not None and not Path(directory).is_dir():
        directory = None
    there = [file, *words] if directory is None else with_absolute_paths([file, *words])
    return LaunchTarget((*program, *there), processes=start.get("processes_per_machine"), folder=directory)


def entry_of_yaml(path: str, words: Sequence[str] = ()) -> str:
    """Return the entry script that takes a run's YAML file.

    Args:
        path: the file.
        words: those after it; --use-torch-fsdp2 among them decides as one in the file does.

    Raises:
        ConfigError: it can't be read, or is no run's.
    """
    content = read_yaml(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected sections such as gpt_args, model and data, found none")
    dialect = max(dialects(), key=lambda item: item.fit(content))
    if dialect.script != "pretrain_transformers.py":
        return dialect.script
    model = content.get("model")
    if isinstance(model, Mapping) and describes_generation(model):
        return "pretrain_sora.py"
    return "pretrain_vlm.py" if _states_megatron(content, words) else dialect.script


def _states_megatron(content: Mapping[str, Any], words: Sequence[str]) -> bool:
    """Whether a file or the words after it say `use_torch_fsdp2: false`."""
    for word in words:
        if word.replace("_", "-").startswith("--use-torch-fsdp2"):
            return word.partition("=")[2].lower() == "false"
    flags = content.get("gpt_args")
    found = _find(flags, "use_torch_fsdp2") if isinstance(flags, Mapping) else None
    return found is not None and not read_bool(found)


def _find(values: Mapping[str, Any], name: str) -> Any:
    for key, value in values.items():
        if isinstance(value, Mapping):
            found = _find(value, name)
            if found is not None:
                return found
        elif key.replace("-", "_") == name:
            return value
    return None


def _is_ours(path: Path) -> bool:
    """Whether a file is one of the entry scripts of this package's checkout, and no user's of the same name."""
    root = Path(__file__).resolve().parents[3]
    return any(path.resolve() == root / name for name in ENTRY_MODULES)


def _expected() -> str:
    return f"{', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}"
