"""Published converters between HF directories and torch_dcp checkpoints (hf_to_dcp, dcp_to_hf), by their arguments."""

from __future__ import annotations

from typing import Any, ClassVar

from mindspeed_mm.tools.converters.generic import checkpoint_to_hf, hf_to_checkpoint
from mindspeed_mm.tools.converters.layouts import require_type
from mindspeed_mm.tools.converters.lora import (
    Factor,
    adapters_to_peft,
    merge_adapters,
    nothing_to_convert_of_adapters,
)
from mindspeed_mm.tools.converters.places import Given, structure, tell_no_effect
from mindspeed_mm.utils.errors import ConfigError

_HEAD = {"lm_head.weight": "model.language_model.embed_tokens.weight"}


class _LoraConverter:
    """The directions of adapters, by published arguments."""

    model_types: ClassVar[tuple[str, ...]]

    def lora_hf_to_dcp(self, hf_dir: str, dcp_dir: str = "") -> None:
        """Say what to pass to --lora-load: a run reads PEFT directories as they are, and nothing is written.

        Args:
            hf_dir: PEFT directory.
            dcp_dir: nothing is written.
        """
        nothing_to_convert_of_adapters(Given("--hf_dir", hf_dir))

    def lora_dcp_to_hf(self, load_dir: str, save_dir: str, model_assets_dir: str | None = None) -> None:
        """Write the adapters of a checkpoint as a PEFT directory.

        Args:
            load_dir: a run folder (its newest checkpoint is taken), or a checkpoint of adapters.
            save_dir: the PEFT directory to write.
            model_assets_dir: no effect, a PEFT directory holds no files of the base model.
        """
        tell_no_effect("--model_assets_dir", model_assets_dir, "a PEFT directory holds no files of the base model")
        adapters_to_peft(Given("--load_dir", load_dir), Given("--save_dir", save_dir))

    def merge_mm_lora_dcp_weight_to_base_hf(
        self,
        base_hf_dir: str,
        lora_dcp_dir: str,
        save_merged_hf_dir: str,
        lora_target_modules: str = "",
        scaling: float | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Write a base model with the adapters of a checkpoint or PEFT directory added, as a HF directory.

        Args:
            base_hf_dir: HF directory of the base model.
            lora_dcp_dir: a run folder, a checkpoint of adapters, or a PEFT directory.
            save_merged_hf_dir: the HF directory to write.
            lora_target_modules: no effect, all adapters are merged.
            scaling: factor on the adapters' output, where nothing beside them says alpha and rank.
            trust_remote_code: let config.json bring Python code of its own.
        """
        tell_no_effect("--lora_target_modules", lora_target_modules, "all adapters are merged")
        merge_adapters(
            Given("--base_hf_dir", base_hf_dir),
            Given("--lora_dcp_dir", lora_dcp_dir),
            Given("--save_merged_hf_dir", save_merged_hf_dir),
            scaling=None if scaling is None else Factor("--scaling", scaling),
            trust_remote_code=trust_remote_code,
            check=lambda model, given: require_type(model, given, self.model_types),
        )


class _DcpConverter(_LoraConverter):
    def hf_to_dcp(
        self,
        hf_dir: str,
        dcp_dir: str,
        tie_weight: bool = False,
        is_lora_base: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Write a HF directory's weights as a torch_dcp checkpoint to start runs from with --load.

        Args:
            hf_dir: HF directory with config.json and weights.
            dcp_dir: receives release/ and latest_checkpointed_iteration.txt.
            tie_weight: no effect, config.json says what is tied; refused if the files hold an output layer of its own.
            is_lora_base: no effect, a run with adapters starts from the same weights under the same names.
            trust_remote_code: let config.json bring Python code of its own.
        """
        tell_no_effect("--is_lora_base", is_lora_base, "a run with adapters starts from the same weights")
        source = Given("--hf_dir", hf_dir)
        model = structure(source, trust_remote_code)
        require_type(model, source, self.model_types)
        hf_to_checkpoint(model, source, Given("--dcp_dir", dcp_dir), ties=_HEAD if tie_weight else None)

    def dcp_to_hf(
        self,
        load_dir: str,
        save_dir: str,
        model_assets_dir: str | None = None,
        to_bf16: bool | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Write a checkpoint's weights as a HF directory: hub names, shards with an index, tokenizer and so on.

        Args:
            load_dir: a run folder (its newest checkpoint is taken), an iter_* or release folder.
            save_dir: the HF directory to write.
            model_assets_dir: HF directory with config.json, tokenizer and so on; without it, the one that the run
                was started from, as the checkpoint remembers it.
            to_bf16: true: write bfloat16; false: the dtypes of the checkpoint; without it, those of model_assets_dir.
            trust_remote_code: let config.json bring Python code of its own.
        """
        checkpoint_to_hf(
            Given("--load_dir", load_dir),
            Given("--save_dir", save_dir),
            Given("--model_assets_dir", model_assets_dir or ""),
            dtype=_dtype(to_bf16),
            trust_remote_code=trust_remote_code,
            check=self._check,
        )

    def _check(self, model: Any, given: Given) -> None:
        require_type(model, given, self.model_types)


class Mistral3Converter(_DcpConverter):
    """Weights of Mistral 3 (Magistral Small): HF directory to torch_dcp and back, by published arguments."""

    model_types = ("mistral3",)


class Qwen3VLConverter(_DcpConverter):
    """Weights of Qwen3-VL: HF directory to torch_dcp and back, by published arguments."""

    model_types = ("qwen3_vl", "qwen3_vl_moe")


class Qwen35Converter:
    """Weights of Qwen3.5: HF directory to torch_dcp and back, by published arguments."""

    model_types = ("qwen3_5", "qwen3_5_moe")

    def hf_to_dcp(
        self,
        hf_dir: str,
        dcp_dir: str,
        dcp_prefix: str = "model.",
        hf_prefix: str = "",
        tie_weight_mapping: dict[str, str] | None = None,
        fused_linear_names: list[str] | None = None,
        num_workers: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        """Write a HF directory's weights as a torch_dcp checkpoint to start runs from with --load.

        Args:
            hf_dir: HF directory with config.json and weights.
            dcp_dir: receives release/ and latest_checkpointed_iteration.txt.
            dcp_prefix: put before the names; runs find any common prefix.
            hf_prefix: taken off the names in the HF files, if they have it.
            tie_weight_mapping: no effect, config.json says what is tied; refused if it contradicts the files.
            fused_linear_names: no effect, the model's class says what is stacked.
            num_workers: no effect, tensors are written one by one.
            trust_remote_code: let config.json bring Python code of its own.
        """
        tell_no_effect("--fused_linear_names", fused_linear_names, "the model's class says what is stacked")
        tell_no_effect("--num_workers", num_workers, "tensors are written one by one")
        source = Given("--hf_dir", hf_dir)
        model = structure(source, trust_remote_code)
        require_type(model, source, self.model_types)
        hf_to_checkpoint(
            model,
            source,
            Given("--dcp_dir", dcp_dir),
            dcp_prefix=dcp_prefix,
            hf_prefix=hf_prefix,
            ties=tie_weight_mapping,
        )

    def dcp_to_hf(
        self,
        dcp_dir: str,
        save_hf_dir: str,
        origin_hf_dir: str | None = None,
        dcp_prefix: str | None = None,
        hf_prefix: str = "",
        fused_linear_names: list[str] | None = None,
        to_bf16: bool | None = None,
        keep_origin_mtp_weights: bool = False,
        num_workers: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        """Write a checkpoint's weights as a HF directory: hub names, shards with an index, tokenizer and so on.

        Args:
            dcp_dir: a run folder (its newest checkpoint is taken), an iter_* or release folder.
            save_hf_dir: the HF directory to write.
            origin_hf_dir: HF directory with config.json, tokenizer and so on; without it, the one that the run was
                started from, as the checkpoint remembers it.
            dcp_prefix: no effect, the prefix of the names is found.
            hf_prefix: no effect, the model's class says the hub's names.
            fused_linear_names: no effect, the model's class says what is stacked.
            to_bf16: true: write bfloat16; false: the dtypes of the checkpoint; without it, those of origin_hf_dir.
            keep_origin_mtp_weights: refused, transformers' class has no multi-token prediction layers.
            num_workers: no effect, tensors are written one by one.
            trust_remote_code: let config.json bring Python code of its own.
        """
        if keep_origin_mtp_weights:
            raise ConfigError(
                "--keep_origin_mtp_weights is true; transformers' class has no multi-token prediction layers, so they "
                "are neither trained nor written: leave it out, and copy the mtp.* tensors from the original files"
            )
        tell_no_effect("--dcp_prefix", dcp_prefix, "the prefix of the names is found")
        tell_no_effect("--hf_prefix", hf_prefix, "the model's class says the hub's names")
        tell_no_effect("--fused_linear_names", fused_linear_names, "the model's class says what is stacked")
        tell_no_effect("--num_workers", num_workers, "tensors are written one by one")
        checkpoint_to_hf(
            Given("--dcp_dir", dcp_dir),
            Given("--save_hf_dir", save_hf_dir),
            Given("--origin_hf_dir", origin_hf_dir or ""),
            dtype=_dtype(to_bf16),
            trust_remote_code=trust_remote_code,
            check=lambda model, given: require_type(model, given, self.model_types),
        )


class ExpertMergeDcpConverter:
    """Weights of any model, with experts stacked: HF directory to torch_dcp and back, by published arguments."""

    def hf_to_dcp(
        self,
        hf_dir: str,
        save_dir: str,
        dcp_prefix: str = "model.",
        hf_prefix: str = "",
        trust_remote_code: bool = False,
    ) -> None:
        """Write a HF directory's weights as a torch_dcp checkpoint to start runs from with --load.

        Args:
            hf_dir: HF directory with config.json and weights.
            save_dir: receives release/ and latest_checkpointed_iteration.txt.
            dcp_prefix: put before the names; runs find any common prefix.
            hf_prefix: taken off the names in the HF files, if they have it.
            trust_remote_code: let config.json bring Python code of its own.
        """
        source = Given("--hf_dir", hf_dir)
        model = structure(source, trust_remote_code)
        hf_to_checkpoint(model, source, Given("--save_dir", save_dir), dcp_prefix=dcp_prefix, hf_prefix=hf_prefix)

    def dcp_to_hf(
        self,
        hf_dir: str,
        dcp_dir: str,
        save_dir: str,
        dcp_prefix: str | None = None,
        hf_prefix: str = "",
        trust_remote_code: bool = False,
    ) -> None:
        """Write a checkpoint's weights as a HF directory: hub names, shards with an index, tokenizer and so on.

        Args:
            hf_dir: HF directory with config.json, tokenizer and so on.
            dcp_dir: a run folder (its newest checkpoint is taken), an iter_* or release folder.
            save_dir: the HF directory to write.
            dcp_prefix: no effect, the prefix of the names is found.
            hf_prefix: no effect, the model's class says the hub's names.
            trust_remote_code: let config.json bring Python code of its own.
        """
        tell_no_effect("--dcp_prefix", dcp_prefix, "the prefix of the names is found")
        tell_no_effect("--hf_prefix", hf_prefix, "the model's class says the hub's names")
        checkpoint_to_hf(
            Given("--dcp_dir", dcp_dir),
            Given("--save_dir", save_dir),
            Given("--hf_dir", hf_dir),
            trust_remote_code=trust_remote_code,
        )


def _dtype(to_bf16: bool | None) -> str | None:
    return None if to_bf16 is None else "bf16" if to_bf16 else "stored"
