"""The backend of a launch that names none, where only one can train the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_mm.configs.files import JSON_SUFFIXES, FileSection, read_json, read_yaml
from mindspeed_mm.configs.flags.parsed import ParsedFlags, backend_of, backends_of
from mindspeed_mm.configs.published import is_given
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

#: parts of model.json that only the FSDP2 backend trains
_PARTS = ("audio_encoder",)
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


def imply_fsdp2(args: ParsedFlags) -> None:
    """Switch a launch with the Megatron backend to FSDP2 where only FSDP2 trains a part of the model.

    Parallel sizes of the Megatron backend become 1, and the parameters are sharded over all ranks unless an fsdp2.yaml
    says otherwise. Which backend computes a step changes neither its loss nor its gradient.

    Args:
        args: parsed flags; `use_torch_fsdp2`, `fsdp2_config_path` and the sizes are set. Nothing changes where the
            script has no FSDP2, or its model.json no such part.
    """
    if backend_of(args) != "ptd" or "fsdp2" not in backends_of(args):
        return
    content = _model_json(args.mm_model)
    parts = [part for part in _PARTS if is_given(content.get(part))]
    if not parts or args.mm_model is None:
        return
    given = [name for name in _SIZES if (getattr(args, name) or 1) > 1]
    sizes = "".join(f"; --{name.replace('_', '-')} {getattr(args, name)} becomes 1" for name in given)
    shards = "" if args.fsdp2_config_path else "; the parameters are sharded over all ranks, as no fsdp2.yaml is given"
    notice(
        f"{args.mm_model}: '{parts[0]}' is not there on the Megatron backend: --use-torch-fsdp2 is implied{shards}"
        f"{sizes}"
    )
    for name in given:
        setattr(args, name, None if name.startswith("virtual") else 1)
    args.use_torch_fsdp2 = True
    if not args.fsdp2_config_path:
        args.fsdp2_config_path = FileSection(args.mm_model, "fsdp2 (implied)", {"sharding_size": "auto"})


def _model_json(path: str | None) -> Mapping[str, Any]:
    """Return the content of model.json; empty where it can't be read, which its own check reports."""
    if isinstance(path, FileSection):
        return path.content if isinstance(path.content, Mapping) else {}
    try:
        is_json = str(path).endswith(JSON_SUFFIXES)
        content = {} if not path else read_json(path) if is_json else read_yaml(path)
    except ConfigError:
        return {}
    if isinstance(content, Mapping) and not is_json:
        content = content.get("model")
    return content if isinstance(content, Mapping) else {}
