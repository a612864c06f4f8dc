"""`fsdp2.yaml`: how FSDP2 shards, recomputes, prefetches and offloads a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from mindspeed_mm.configs.files import FileSection, read_yaml
from mindspeed_mm.configs.scalars import read_bool, read_int, show
from mindspeed_mm.configs.sections import Bool, Count, DtypeName, Paths, Section, Size, build_section
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice


def _read_sharding_size(value: object) -> object:
    if value is None:
        return 1
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        size = read_int(value)
    except ValueError:
        size = 0
    if size < 1:
        raise ValueError("expected a whole number of at least 1, or auto (all data-parallel ranks)")
    return size


def _read_reshard(value: object) -> bool | int:
    try:
        return read_bool(value)
    except ValueError:
        pass
    try:
        size = read_int(value)
    except ValueError:
        size = 0
    if size < 2:
        raise ValueError("expected true (ZeRO-3), false (ZeRO-2) or the number of ranks to reshard over (at least 2)")
    return size


def _read_compile(value: object) -> object:
    if isinstance(value, list):
        return value
    try:
        return read_bool(value)
    except ValueError:
        written = f": write it as an item, '- {value}'" if isinstance(value, str) else ""
        raise ValueError(f"expected true (all blocks), false or a list of module paths{written}") from None


ShardingSize = Annotated[int | Literal["auto"], BeforeValidator(_read_sharding_size)]


class Fsdp2Config(Section):
    """The keys of fsdp2.yaml, typed. Module paths are relative to the HF model (or the user's own model).

    Path patterns: `a.b.{*}` every child, `a.b.{0-23}` a range, `a.b.{1,3,5}` a list, a tail may follow the brace.
    """

    sharding_size: ShardingSize = Field(
        1,
        description="ranks that share one copy of the parameters; auto = all data-parallel ranks; "
        "less than these = HSDP (copies of sharded models)",
    )
    sub_modules_to_wrap: Paths | None = Field(
        None, description="module paths that become FSDP units of their own (the root always is one)"
    )
    ignored_modules: Paths | None = Field(
        None,
        description="module paths that stay whole on every rank, in param_dtype as the others; their gradients are "
        "summed over ranks once a step",
    )
    recompute_modules: Paths | None = Field(
        None, description="module paths whose activations are recomputed in the backward pass"
    )
    recompute_keep: list[Literal["linear", "attention"]] = Field(
        [],
        description="ours: operations whose outputs recomputed modules keep, so that backward doesn't run them again: "
        "linear = products with weights, attention = its fused kernel; not with the reentrant engine",
    )
    activation_offload_modules: Paths | None = Field(
        None,
        description="ours: module paths whose activations (of recomputed ones the inputs) wait for the backward pass "
        "in host memory",
    )
    chunk_mbs_modules: Paths | None = Field(
        None, description="ours: modules that run on parts of a micro-batch, one after another, gathered once"
    )
    chunk_mbs_size: Count = Field(1, description="ours: chunk_mbs_modules: rows of a part")
    chunk_mbs_batch_dim: Size = Field(0, description="ours: chunk_mbs_modules: dimension of the rows")
    chunk_mbs_args: list[Size] = Field(
        [0], description="ours: chunk_mbs_modules: positions of arguments that are split"
    )
    chunk_mbs_kwargs: list[str] = Field([], description="ours: chunk_mbs_modules: names of arguments that are split")
    chunk_mlp_tokens: Count | None = Field(
        None,
        description="ours: the MLPs of blocks run on so many tokens at a time, and so does their recompute; also "
        "--chunk-mlp-tokens; null = on all at once",
    )
    chunk_mlp_modules: Paths | None = Field(
        None, description="ours: chunk_mlp_tokens: module paths of MLPs; null = those of all blocks, without experts"
    )
    use_reentrant: Bool = Field(True, description="recompute with the reentrant autograd engine")
    param_dtype: DtypeName | None = Field(
        None,
        description="dtype of gathered parameters and of the computation; null = --bf16/--fp16, else fp32; frozen "
        "weights are stored in it, too, if files or checkpoint hold them in no wider one",
    )
    reduce_dtype: DtypeName | None = Field(
        None, description="dtype that gradients are summed in, over ranks and deferred micro-batches; null = fp32"
    )
    output_dtype: DtypeName | None = Field(None, description="dtype that forward outputs are cast to; null = no cast")
    cast_forward_inputs: Bool = Field(
        True,
        description="cast a unit's forward inputs to param_dtype; of a transformers model its own inputs, and inside "
        "of it hidden states alone: rotary tables, positions and masks keep the precision that it gives them",
    )
    reshard_after_forward: Annotated[bool | int, BeforeValidator(_read_reshard)] = Field(
        True,
        description="true = free parameters after forward (ZeRO-3), false = keep them till backward (ZeRO-2), "
        "a number = reshard over that many ranks",
    )
    offload_to_cpu: Bool = Field(False, description="keep parameters, gradients and optimizer state in host memory")
    pin_memory: Bool = Field(False, description="pin that host memory (only with offload_to_cpu)")
    num_to_forward_prefetch: Size | None = Field(
        None, description="units prefetched in forward; null = 1 on devices, 0 on the host"
    )
    num_to_backward_prefetch: Size = Field(1, description="units prefetched in backward")
    defer_gradient_sync: Bool = Field(
        False,
        description="ours: reduce gradients once a step instead of once a micro-batch; "
        "every rank then holds whole unsharded gradients in between",
    )
    expert_parallel_size: Count = Field(
        1, description="ranks that split the experts of a layer; also --expert-model-parallel-size"
    )
    moe_modules: Paths | None = Field(
        None, description="module paths of the experts; null = all modules of experts that transformers knows"
    )
    reshard_local_experts: Bool = Field(
        True,
        description="true = shard each rank's experts further, over all ranks that have the same ones; false = keep "
        "them whole; ep_fsdp_size sets the number of ranks",
    )
    ep_fsdp_size: Count | None = Field(
        None, description="ours: ranks that shard each rank's experts further; null = as reshard_local_experts says"
    )
    tp_colwise: Paths | None = Field(
        None,
        description="ours: module paths of linear layers whose outputs tensor-parallel ranks split; null = the "
        "family's own",
    )
    tp_rowwise: Paths | None = Field(
        None,
        description="ours: module paths of linear layers whose inputs tensor-parallel ranks split; null = the "
        "family's own",
    )
    cp_split_media: Bool = Field(
        True,
        description="ours: each context-parallel rank encodes a part of a micro-batch's images and videos; "
        "false = each encodes all of them",
    )
    float8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = Field(
        None,
        description="ours: linear layers multiply in float8, by torchao's recipe of this name (tensorwise is the "
        "fastest, rowwise_with_gw_hp the most exact); parameters and gradients stay as they are; null = they don't",
    )
    float8_modules: Paths | None = Field(
        None,
        description="ours: float8_recipe: module paths whose linear layers multiply in float8; null = all blocks",
    )
    float8_all_gather: Bool = Field(
        False, description="ours: float8_recipe tensorwise: gather the weights of these layers in float8"
    )
    float8_emulate: Bool = Field(
        False,
        description="ours: float8_recipe: round to float8 and multiply in param_dtype, which any device can, slower",
    )
    compile: Annotated[bool | list[str], BeforeValidator(_read_compile)] = Field(
        False,
        description="ours: true = the computation of each block is compiled by torch.compile, once for all like "
        "blocks and any length; a list = that of the modules at these paths; also --torch-compile",
    )
    compile_backend: Literal["inductor", "aot_eager"] = Field(
        "inductor",
        description="ours: compile: inductor = fused kernels; aot_eager = graphs are captured and run operator by "
        "operator, to find out what a difference comes from",
    )
    ignore_missing_modules: Bool = Field(
        False,
        description="ours: entries of sub_modules_to_wrap, recompute_modules and the lists of offload and chunks that "
        "match nothing are left out, with a notice; false = they are an error",
    )
    align_fsdp_param_groups: Bool = Field(
        False, description="no effect here: FSDP2 units take parameters of any kind and size"
    )
    _file: str = PrivateAttr("fsdp2.yaml")

    @model_validator(mode="after")
    def _agree_about_experts(self) -> Fsdp2Config:
        size = self.ep_fsdp_size
        if "reshard_local_experts" not in self.model_fields_set or size is None:
            return self
        if self.reshard_local_experts != (size > 1):
            raise ValueError(
                f"'ep_fsdp_size' is {size} and 'reshard_local_experts' {str(self.reshard_local_experts).lower()}: one "
                f"says that each rank's experts are {'kept whole' if size == 1 else 'sharded'}, the other that they "
                "aren't; keep ep_fsdp_size"
            )
        return self

    @model_validator(mode="after")
    def _agree_about_float8(self) -> Fsdp2Config:
        if self.float8_recipe is None:
            given = [key for key in ("float8_modules", "float8_all_gather", "float8_emulate") if getattr(self, key)]
            if given:
                raise ValueError(f"'{given[0]}' is given without 'float8_recipe'; write float8_recipe: tensorwise")
        elif self.float8_all_gather and self.float8_recipe != "tensorwise":
            raise ValueError(
                f"'float8_all_gather' needs one scale a weight, and 'float8_recipe' is '{self.float8_recipe}'; write "
                "float8_recipe: tensorwise, or float8_all_gather: false"
            )
        return self

    @model_validator(mode="after")
    def _agree_about_recompute(self) -> Fsdp2Config:
        if self.recompute_keep and self.use_reentrant and "use_reentrant" in self.model_fields_set:
            raise ValueError(
                "'use_reentrant' is true, and 'recompute_keep' needs the other engine; write use_reentrant: false"
            )
        return self

    @property
    def file(self) -> str:
        """What messages call the file that this was read from."""
        return self._file

    @property
    def compiles_kernels(self) -> bool:
        """Whether kernels are compiled for the machine, as they are by inductor."""
        return bool(self.compile) and self.compile_backend == "inductor"

    def with_compile(self) -> Fsdp2Config:
        """Return this file with all blocks compiled, unless it says itself what is.

        Raises:
            ConfigError: it says that nothing is.
        """
        if "compile" not in self.model_fields_set:
            return self.model_copy(update={"compile": True})
        if not self.compile:
            raise ConfigError(
                f"--torch-compile compiles all blocks, and {self.file}: compile is {show(self.compile)}, which is none "
                "of them; remove one of the two"
            )
        return self

    @property
    def expert_sharding_size(self) -> int | None:
        """Number of ranks that shard each rank's experts further; None: all that have the same experts."""
        if self.ep_fsdp_size is not None:
            return self.ep_fsdp_size
        return None if self.reshard_local_experts else 1

    @classmethod
    def from_dict(cls, mapping: object, file: str | None = None) -> Fsdp2Config:
        """Type a mapping with the keys of fsdp2.yaml.

        Args:
            mapping: ConfigReader or dict; None (an empty file) means all defaults.
            file: name to use in messages.

        Raises:
            ConfigError: unknown keys and wrong values, all in one message.
        """
        if isinstance(mapping, cls):
            return mapping
        file = file or "fsdp2.yaml"
        config, _ = build_section(cls, {} if mapping is None else mapping, file, "fsdp2.yaml", kind="fsdp2")
        config._file = file
        for key in ("align_fsdp_param_groups",):
            if key in config.model_fields_set:
                notice(f"{file}: '{key}' has {cls.model_fields[key].description}", key=f"fsdp2:{key}")
        if config.pin_memory and not config.offload_to_cpu:
            notice(f"{file}: 'pin_memory' has no effect without offload_to_cpu: true", key="fsdp2:pin_memory")
        return config


def load_fsdp2_config(path: str | Path | None) -> Fsdp2Config:
    """Read fsdp2.yaml, or the section of a run's file in its place; no path (None or "") means all defaults.

    Raises:
        ConfigError: the file is missing or no YAML, or has unknown keys or wrong values.
    """
    if isinstance(path, FileSection):
        return Fsdp2Config.from_dict(path.content, file=path.label)
    return Fsdp2Config.from_dict(read_yaml(path) if path else None, file=str(path) if path else None)
