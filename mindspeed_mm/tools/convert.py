"""`mm-convert`: convert weights between the hub's layout and torch_dcp, and inspect either. Needs no accelerator.

    mm-convert GenericDCPConverter hf_to_dcp --hf_dir HF --dcp_dir OUT
    mm-convert GenericDCPConverter dcp_to_hf --load_dir RUN_OR_CHECKPOINT --save_dir OUT --model_assets_dir HF
    mm-convert Qwen2_5_VLConverter hf_to_mm --cfg.hf_config.hf_dir HF --cfg.mm_dir OUT
    mm-convert Qwen2_5_VLConverter mm_to_hf --cfg.hf_config.hf_dir HF --cfg.mm_dir RUN --cfg.save_hf_dir OUT
    mm-convert info DIR
    mm-convert verify DIR

Arguments can also come from a YAML file (`--config`), or from MM_CONVERT_* variables with
JSONARGPARSE_DEFAULT_ENV=true.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import mindspeed_mm.utils.interrupted  # noqa: F401  (before what takes long to import)
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.tools.inspect_weights import info, progress_bar, size_words, verify_weights
from mindspeed_mm.tools.published_converters import refuse_unknown
from mindspeed_mm.utils.errors import CheckpointError, ConfigError, MMError
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.log import notice
from mindspeed_mm.utils.torch_import import import_torch

if TYPE_CHECKING:
    from mindspeed_mm.checkpoint.lazy import LazyTensor
    from mindspeed_mm.checkpoint.sources import WeightSource


class GenericDCPConverter:
    """Weights of any transformers or diffusers model: HF directory to torch_dcp folder and back."""

    def hf_to_dcp(
        self,
        hf_dir: str,
        dcp_dir: str,
        dcp_prefix: str = "model.",
        hf_prefix: str = "",
        tie_weight_mapping: dict[str, str] | None = None,
        fused_linear_names: list[str] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Write a HF directory's weights as a torch_dcp checkpoint to start runs from with --load.

        Tensors are written one by one, under the names and in the shapes that the model has in training (experts
        stacked, ties once), in the dtypes of the files.

        Args:
            hf_dir: HF directory with config.json and weights.
            dcp_dir: receives release/ and latest_checkpointed_iteration.txt.
            dcp_prefix: put before the names; runs find any common prefix.
            hf_prefix: taken off the names in the HF files, if they have it.
            tie_weight_mapping: no effect, config.json says what is tied.
            fused_linear_names: no effect, the model's class says what is stacked.
            trust_remote_code: let config.json bring Python code of its own.
        """
        _log_no_effect(tie_weight_mapping, fused_linear_names)
        from mindspeed_mm.checkpoint.dcp_writer import write_dcp
        from mindspeed_mm.checkpoint.lazy import forget
        from mindspeed_mm.checkpoint.manifest import sum_file, write_manifest
        from mindspeed_mm.checkpoint.run_folder import TRACKER
        from mindspeed_mm.checkpoint.safetensors_writer import tensor_bytes
        from mindspeed_mm.checkpoint.sources import open_weights
        from mindspeed_mm.checkpoint.weights import plan_weights, refuse_misfits
        from mindspeed_mm.utils.files import fsync_path, replace_file

        model = _structure(hf_dir, "--hf_dir", trust_remote_code)
        source = _Unprefixed(open_weights(hf_dir), hf_prefix)
        plan = plan_weights(model, source)
        refuse_misfits(plan, model, source, strict=True)
        values = {dcp_prefix + name: node for name, node in plan.values.items()}
        target, root = Path(dcp_dir) / "release", Path(dcp_dir)
        _refuse_existing(target, "--dcp_dir")
        working = root / ".release.saving"
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
        total = sum(tensor_bytes(node.shape, node.dtype) for node in values.values())
        with _undone_on_failure(working):
            with progress_bar(f"{hf_dir} → {target}", total) as advance:
                names = write_dcp(working, values, advance)
            forget()
            with progress_bar("checksums", sum((working / n).stat().st_size for n in names)) as advance:
                sums = {name: sum_file(working / name, advance) for name in names}
            write_manifest(working, 0, sums)
            fsync_path(working)
            os.rename(working, target)
        replace_file(root / TRACKER, "release")
        print(f"{len(values)} tensors, {size_words(total)}, in {target}; start a run from it with --load {dcp_dir}")

    def dcp_to_hf(
        self,
        load_dir: str,
        save_dir: str,
        model_assets_dir: str | None = None,
        dtype: str | None = None,
        dcp_prefix: str | None = None,
        hf_prefix: str = "",
        tie_weight_mapping: dict[str, str] | None = None,
        fused_linear_names: list[str] | None = None,
        trust_remote_code: bool = False,
        averaged: bool = False,
    ) -> None:
        """Write a checkpoint's weights as a HF directory: hub names, shards with an index, tokenizer and so on.

        Args:
            load_dir: a run folder (its newest checkpoint is taken), an iter_* or release folder.
            save_dir: the HF directory to write.
            model_assets_dir: HF directory with config.json, tokenizer and so on; without it, the one that the run
                was started from, as the checkpoint remembers it.
            dtype: of the written weights; without it, that of the same weight in model_assets_dir, else config.json's.
            dcp_prefix: no effect, the prefix of the names is found.
            hf_prefix: no effect, the model's class says the hub's names.
            tie_weight_mapping: no effect, config.json says what is tied.
            fused_linear_names: no effect, the model's class says what is stacked.
            trust_remote_code: let config.json bring Python code of its own.
            averaged: write the averages that a run with --ema-decay kept, in the place of the trained weights.
        """
        _log_no_effect(tie_weight_mapping, fused_linear_names)
        if dcp_prefix:
            notice("--dcp_prefix has no effect: the prefix of the names is found")
        if hf_prefix:
            notice("--hf_prefix has no effect: the model's class says the hub's names")
        from mindspeed_mm.checkpoint.hf_export import export_from
        from mindspeed_mm.checkpoint.safetensors_writer import tensor_bytes
        from mindspeed_mm.checkpoint.sources import DcpWeights, open_weights
        from mindspeed_mm.utils.dtypes import to_torch_dtype

        directory = _checkpoint_in(load_dir)
        assets = model_assets_dir or _remembered_source(directory)
        model = _structure(assets, "--model_assets_dir", trust_remote_code)
        source = DcpWeights(directory, averaged=True) if averaged else open_weights(directory)
        _refuse_existing(Path(save_dir), "--save_dir")
        wanted = to_torch_dtype(dtype)
        total = sum(tensor_bytes(tuple(t.shape), wanted or t.dtype) for t in source.tensors().values())
        with progress_bar(f"{directory} → {save_dir}", total) as advance:
            count = export_from(source, model, Path(save_dir), assets, wanted, advance)
        print(f"{count} tensors in {save_dir}; it loads with from_pretrained")


@dataclass
class HfConfig:
    """A HF directory.

    Args:
        hf_dir: HF directory with config.json, weights and tokenizer.
    """

    hf_dir: str


@dataclass
class ParallelConfig:
    """A layout; it is checked, and has no effect, as a checkpoint fits every layout.

    Args:
        llm_pp_layers: language layers of each pipeline stage, [12,16], or [virtual stage][pipeline rank], [[12,16]].
        vit_pp_layers: the same of the vision tower.
        tp_size: tensor-parallel ranks.
    """

    llm_pp_layers: list[list[int]] | list[int] | None = None
    vit_pp_layers: list[list[int]] | list[int] | None = None
    tp_size: int = 1

    def rows(self, name: str) -> list[list[int]] | None:
        """The layers of a part as [virtual stage][pipeline rank]."""
        given = getattr(self, name)
        return [given] if given and isinstance(given[0], int) else given


@dataclass
class CommonModelConfig:
    """The form of the weights; there is only one here.

    Args:
        enable_canonical_hf_struct: no effect, weights are stored under transformers' names, and none is fused.
    """

    enable_canonical_hf_struct: bool | None = None


@dataclass
class HfToMm:
    """Arguments of hf_to_mm.

    Args:
        mm_dir: receives release/ and latest_checkpointed_iteration.txt.
        hf_config: where the weights are.
        parallel_config: layout of the run.
        common_model_config: form of the weights.
        trust_remote_code: let config.json bring Python code of its own.
    """

    mm_dir: str
    hf_config: HfConfig
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    common_model_config: CommonModelConfig = field(default_factory=CommonModelConfig)
    trust_remote_code: bool = False


@dataclass
class MmToHf:
    """Arguments of mm_to_hf.

    Args:
        mm_dir: a run folder (its newest checkpoint is taken), an iter_* or release folder.
        save_hf_dir: the HF directory to write.
        hf_config: where config.json, tokenizer and so on are.
        parallel_config: layout of the run.
        common_model_config: form of the weights.
        trust_remote_code: let config.json bring Python code of its own.
    """

    mm_dir: str
    save_hf_dir: str
    hf_config: HfConfig
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    common_model_config: CommonModelConfig = field(default_factory=CommonModelConfig)
    trust_remote_code: bool = False


class Qwen2_5_VLConverter:
    """Weights of Qwen2.5-VL: HF directory to a checkpoint for pretrain_vlm.py and back, by published options."""

    def hf_to_mm(self, cfg: HfToMm) -> None:
        """Write a HF directory's weights as a checkpoint that either backend starts from with --load, in any layout."""
        _check_layout(cfg.hf_config.hf_dir, cfg.parallel_config, cfg.trust_remote_code)
        _log_one_form(cfg.common_model_config)
        GenericDCPConverter().hf_to_dcp(cfg.hf_config.hf_dir, cfg.mm_dir, trust_remote_code=cfg.trust_remote_code)

    def mm_to_hf(self, cfg: MmToHf) -> None:
        """Write the weights of a checkpoint of either backend, from any layout, as a HF directory."""
        hf_dir = cfg.hf_config.hf_dir
        _check_layout(hf_dir, cfg.parallel_config, cfg.trust_remote_code)
        _log_one_form(cfg.common_model_config)
        GenericDCPConverter().dcp_to_hf(
            cfg.mm_dir, cfg.save_hf_dir, model_assets_dir=hf_dir, trust_remote_code=cfg.trust_remote_code
        )


def _check_layout(hf_dir: str, layout: ParallelConfig, trust_remote_code: bool) -> None:
    config = _structure(hf_dir, "--cfg.hf_config.hf_dir", trust_remote_code).config
    if config.model_type != "qwen2_5_vl":
        raise ConfigError(
            f"--cfg.hf_config.hf_dir: '{hf_dir}' holds a model of type '{config.model_type}'; expected qwen2_5_vl, and "
            "GenericDCPConverter converts any other"
        )
    text, vision = config.get_text_config(), config.vision_config
    layers = {"llm_pp_layers": text.num_hidden_layers, "vit_pp_layers": vision.depth}
    stages = set()
    for name, total in layers.items():
        rows = layout.rows(name)
        if rows is None:
            continue
        stages.add(tuple(len(row) for row in rows))
        found = sum(sum(row) for row in rows)
        if found != total:
            raise ConfigError(
                f"--cfg.parallel_config.{name} {getattr(layout, name)} adds up to {found}; the model has {total} layers"
            )
    if len(stages) > 1:
        raise ConfigError(
            f"--cfg.parallel_config: llm_pp_layers {layout.llm_pp_layers} and vit_pp_layers {layout.vit_pp_layers} "
            "name different numbers of pipeline stages"
        )
    heads = {"attention heads": text.num_attention_heads, "key-value heads": text.num_key_value_heads}
    for what, number in {**heads, "heads in the vision tower": vision.num_heads}.items():
        if layout.tp_size < 1 or number % layout.tp_size:
            fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            raise ConfigError(
                f"--cfg.parallel_config.tp_size is {layout.tp_size}; the model has {number} {what}, which it does not "
                f"divide: expected one of {fitting}"
            )
    if stages or layout.tp_size > 1:
        notice("--cfg.parallel_config has no effect: a checkpoint fits every layout")


def _log_one_form(form: CommonModelConfig) -> None:
    if form.enable_canonical_hf_struct:
        notice(
            "--cfg.common_model_config.enable_canonical_hf_struct has no effect: weights are stored under "
            "transformers' names, and none is fused"
        )


class _Unprefixed:
    """A source without a prefix of its names."""

    in_hub_layout = True

    def __init__(self, source: WeightSource, prefix: str) -> None:
        self.path, self._source, self._prefix = source.path, source, prefix

    def tensors(self) -> dict[str, LazyTensor]:
        found = self._source.tensors()
        if self._prefix and not any(name.startswith(self._prefix) for name in found):
            notice(f"--hf_prefix '{self._prefix}' has no effect: no name in '{self.path}' begins with it")
        return {name.removeprefix(self._prefix): t for name, t in found.items()}


#: converter → its directions
CONVERTERS: dict[type, tuple[str, ...]] = {
    GenericDCPConverter: ("hf_to_dcp", "dcp_to_hf"),
    Qwen2_5_VLConverter: ("hf_to_mm", "mm_to_hf"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    try:
        require_extra("convert", "mm-convert")
    except MMError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    from jsonargparse import ArgumentParser

    functions: dict[str, Callable[..., int]] = {"info": info, "verify": verify_weights}
    words = list(sys.argv[1:] if argv is None else argv)
    directions_of = {converter_class.__name__: methods for converter_class, methods in CONVERTERS.items()}
    try:
        refuse_unknown(words, {**directions_of, **dict.fromkeys(functions, ())})
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 1
    parser = ArgumentParser(prog="mm-convert", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subcommands(dest="command")
    for converter_class, methods in CONVERTERS.items():
        converter = ArgumentParser(description=_first_line(converter_class))
        commands.add_subcommand(converter_class.__name__, converter, help=converter.description)
        directions = converter.add_subcommands(dest="direction")
        for name in methods:
            method = ArgumentParser(description=_first_line(getattr(converter_class, name)))
            method.add_argument("--config", action="config", help="YAML file with the arguments")
            method.add_method_arguments(converter_class, name, as_positional=False)
            directions.add_subcommand(name, method, help=method.description)
    for name, function in functions.items():
        sub = ArgumentParser(description=_first_line(function))
        sub.add_function_arguments(function, as_positional=True)
        commands.add_subcommand(name, sub, help=sub.description)
    options = parser.parse_args(words)
    _end_quietly_on_closed_pipe()
    import_torch()
    chosen = options[options.command]
    try:
        if options.command in functions:
            return functions[options.command](**chosen.as_dict())
        arguments = chosen[chosen.direction].as_dict()
        arguments.pop("config", None)
        converters = {converter_class.__name__: converter_class for converter_class in CONVERTERS}
        convert = getattr(converters[options.command](), chosen.direction)
        hints = get_type_hints(convert)
        convert(**{name: _typed(hints[name], value) for name, value in arguments.items()})
        return 0
    except MMError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _typed(hint: object, value: object) -> object:
    """Build the dataclass of a parameter's type from nested dicts; return any other value unchanged."""
    if not (isinstance(hint, type) and is_dataclass(hint) and isinstance(value, Mapping)):
        return value
    hints = get_type_hints(hint)
    return hint(**{name: _typed(hints[name], inner) for name, inner in value.items()})


def _end_quietly_on_closed_pipe() -> None:
    """Let `mm-convert info DIR | head` end without an error."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").strip().splitlines()[0]


def _log_no_effect(tie_weight_mapping: dict[str, str] | None, fused_linear_names: list[str] | None) -> None:
    if tie_weight_mapping:
        notice("--tie_weight_mapping has no effect: config.json says what is tied")
    if fused_linear_names:
        notice("--fused_linear_names has no effect: the model's class says what is stacked")


def _structure(hf_dir: str, flag: str, trust_remote_code: bool) -> Any:
    """Build the model of config.json on the meta device."""
    import torch

    from mindspeed_mm.checkpoint.sources import listing
    from mindspeed_mm.models.common.build_context import BuildContext, build_context
    from mindspeed_mm.models.common.diffusers_init import diffusers_structure
    from mindspeed_mm.models.common.modelzoo import ModelHub
    from mindspeed_mm.models.transformers.meta_model import config_for
    from mindspeed_mm.models.transformers_model import load_hf_config

    if not Path(hf_dir).is_dir():
        raise ConfigError(f"{flag}: {describe_missing_model(hf_dir)}; expected a HF directory")
    if not (Path(hf_dir) / "config.json").is_file():
        raise ConfigError(
            f"{flag}: '{hf_dir}' has no config.json; expected a HF directory; it holds {listing(Path(hf_dir))}"
        )
    if (structure := diffusers_structure(Path(hf_dir))) is not None:
        return structure
    with build_context(BuildContext(trust_remote_code=trust_remote_code)):
        config = load_hf_config(hf_dir)
    model_class: Any = ModelHub.get(None, config, where=str(Path(hf_dir) / "config.json"))
    with torch.device("meta"):
        dtype = getattr(config, "dtype", None) or torch.float32
        return model_class._from_config(config_for(model_class, config), dtype=dtype)


def _checkpoint_in(load_dir: str) -> Path:
    from mindspeed_mm.checkpoint.run_folder import find_checkpoint, has_checkpoint

    return find_checkpoint(load_dir).directory if has_checkpoint(load_dir) else Path(load_dir)


def _remembered_source(directory: Path) -> str:
    from mindspeed_mm.checkpoint.dcp import read_state

    state = read_state(directory) if (directory / "state.json").is_file() else {}
    source = state.get("source")
    if source is None or not (Path(source) / "config.json").is_file():
        where = f"'{source}', which it was started from, is not there" if source else "it does not say where it began"
        raise ConfigError(
            f"'{directory}' holds no config.json and {where}; give --model_assets_dir, the HF directory that has it"
        )
    return str(source)


def _refuse_existing(path: Path, flag: str) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{flag}: '{path}' is there already; remove it, or choose another place")


@contextmanager
def _undone_on_failure(working: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        shutil.rmtree(working, ignore_errors=True)
        raise CheckpointError(f"'{working.parent}' can't be written: {error}; nothing is left of it") from error
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
