"""`tools.json`: profiler and memory snapshots. `{}` turns both off."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from mindspeed_mm.configs.published import NoEffect, log_no_effect, published_paths
from mindspeed_mm.configs.sections import Bool, Count, Int, Section, Size, build_section


def _read_ranks(value: object) -> object:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


Ranks = Annotated[list[Int], BeforeValidator(_read_ranks)]


class StaticProfile(Section):
    """`profile.static_param`: steps fixed in advance."""

    level: Literal["level0", "level1", "level2"] = Field("level1", description="detail of NPU traces")
    with_stack: Bool = Field(False, description="record call stacks")
    with_memory: Bool = Field(False, description="record memory")
    record_shapes: Bool = Field(False, description="record tensor shapes")
    with_cpu: Bool = Field(True, description="record the host's side too")
    save_path: str = Field("./npu_profiling", description="folder of the traces")
    start_step: Size = Field(10, description="first step recorded")
    end_step: Count = Field(11, description="recording ends before this step")
    data_simplification: Bool = Field(False, description="NPU: keep only the parsed data")
    aic_metrics_type: Literal["PipeUtilization", "ArithmeticUtilization"] = Field(
        "PipeUtilization", description="NPU: which counters"
    )
    analyse_flag: Bool = Field(True, description="NPU: parse the trace at the end")


class DynamicProfile(Section):
    """`profile.dynamic_param`."""

    config_path: str | None = Field(
        None, description="folder of profiler_config.json, which is read whenever it changes; null = the current one"
    )


class ProfilerFile(Section):
    """profiler_config.json, by the names of torch_npu's dynamic_profile; a changed file begins a profile."""

    activities: list[Literal["CPU", "CUDA", "NPU"]] = Field(["CPU", "NPU"], description="sides that are recorded")
    prof_dir: str = Field("./profile", description="folder of the traces")
    analyse: Bool = Field(False, description="no effect: a trace is written at once")
    record_shapes: Bool = Field(False, description="record tensor shapes")
    profile_memory: Bool = Field(False, description="record memory")
    with_stack: Bool = Field(False, description="record call stacks")
    with_flops: Bool = Field(False, description="record operators' FLOPs")
    with_modules: Bool = Field(False, description="record the modules of operators")
    active: Size = Field(1, description="steps that are recorded; 0 ends the profile that runs")
    warmup: Size = Field(0, description="steps before them in which the profiler runs and nothing is kept")
    start_step: Size = Field(0, description="first step; 0 = the next one")
    is_rank: Bool = Field(False, description="record the ranks of rank_list only")
    rank_list: Ranks = Field([], description="ranks that record")

    @classmethod
    def from_dict(cls, content: object, file: str) -> ProfilerFile:
        """Type the content of the file.

        Raises:
            ConfigError: unknown keys or wrong values.
        """
        config, keys = build_section(cls, content, file, file, ("experimental_config", "metadata", "is_valid"))
        idle = {**keys.published, **({"analyse": True} if config.analyse else {})}
        log_no_effect(idle, (NoEffect(".*", "a trace of torch's profiler is written at once, and nothing else"),), file)
        return config


class Profile(Section):
    """`profile`."""

    enable: Bool = Field(False, description="profile this run")
    profile_type: Literal["static", "dynamic"] = Field("static", description="static, or dynamic (switched by a file)")
    ranks: Ranks = Field([0, 1, 2, 3], description="ranks that record; [-1] = all")
    static_param: StaticProfile = Field(StaticProfile(), description="what static records")
    dynamic_param: DynamicProfile = Field(DynamicProfile(), description="for profile_type dynamic")

    @model_validator(mode="after")
    def _steps_in_order(self) -> Profile:
        start, end = self.static_param.start_step, self.static_param.end_step
        if self.enable and self.profile_type == "static" and end <= start:
            raise ValueError(f"'static_param.end_step' {end} must be greater than 'static_param.start_step' {start}")
        return self


class MemoryProfile(Section):
    """`memory_profile`."""

    enable: Bool = Field(False, description="record memory snapshots")
    start_step: Size = Field(0, description="recording starts at this step; 0 = before the model is built")
    end_step: Count = Field(2, description="the snapshot is written at this step")
    save_path: str = Field("./memory_snapshot", description="folder of the snapshots")
    dump_ranks: Ranks = Field([0], description="ranks that record")
    stacks: Literal["all", "python"] = Field("all", description="which call stacks")
    max_entries: Count | None = Field(None, description="most entries kept; null = no limit")
    mem_info: Bool = Field(False, description="log each step's peaks")

    @model_validator(mode="after")
    def _steps_in_order(self) -> MemoryProfile:
        if self.enable and self.end_step <= self.start_step:
            raise ValueError(f"'end_step' {self.end_step} must be greater than 'start_step' {self.start_step}")
        return self


class ToolsConfig(Section):
    """tools.json, typed."""

    profile: Profile = Field(Profile(), description="profiler")
    memory_profile: MemoryProfile = Field(MemoryProfile(), description="memory snapshots")

    @classmethod
    def from_dict(cls, mapping: object, file: str | None = None) -> ToolsConfig:
        """Type the content of tools.json; None and `{}` mean that both tools are off.

        Raises:
            ConfigError: unknown keys or wrong values.
        """
        if isinstance(mapping, cls):
            return mapping
        file = file or getattr(mapping, "config_file", None) or "tools.json"
        config, keys = build_section(cls, {} if mapping is None else mapping, file, file, published_paths("tools"))
        log_no_effect(keys.published, (NoEffect(".*", "feature extraction has a command of its own"),), file)
        return config
