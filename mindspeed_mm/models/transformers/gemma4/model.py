"""Class of Gemma 4, whose layers may share keys and values, and whose tables may be read outside of their modules."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers import Gemma4ForConditionalGeneration as HFGemma4

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.base_model import adapt_class
from mindspeed_mm.models.common.build_context import fsdp2_config
from mindspeed_mm.models.common.paths import listed_modules
from mindspeed_mm.models.common.sharding_outline import ShardingOutline
from mindspeed_mm.models.transformers.gemma4.traits import traits_for
from mindspeed_mm.parallel.patterns import containing_path
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import notice

_EMBEDDING = "model.language_model.embed_tokens"


class Gemma4ForConditionalGeneration(adapt_class(HFGemma4)):  # type: ignore[misc]
    """The transformers class, which refuses what would train it otherwise than transformers does."""

    __module__ = HFGemma4.__module__

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: Gemma4Config.
        """
        super().__init__(config)
        self.traits = traits_for(config)
        self._shares_keys = config.text_config.num_kv_shared_layers > 0
        if self._shares_keys:
            self.fsdp2_overrides = {"use_reentrant": False}

    def plan_sharding(self, world_size: int, fsdp2_config_path: str | None = None) -> ShardingOutline:
        """See FSDP2Mixin.plan_sharding."""
        self._check_layout(fsdp2_config(fsdp2_config_path))
        return super().plan_sharding(world_size, fsdp2_config_path)

    def _pre_fully_shard(
        self, process_group: dist.ProcessGroup | None, fsdp2_config_path: str | None
    ) -> tuple[dict[str, Any], Fsdp2Config]:
        self._check_layout(fsdp2_config(fsdp2_config_path))
        return super()._pre_fully_shard(process_group, fsdp2_config_path)

    def _check_layout(self, config: Fsdp2Config) -> None:
        """
        Raises:
            ConfigError: chunks of a micro-batch, or a unit with the embedding, which this model can't have.
        """
        chunked = listed_modules(self, config, "chunk_mbs_modules")
        if self._shares_keys and any(path.startswith("model.language_model.") for path in chunked):
            raise ConfigError(
                f"{config.file}: chunk_mbs_modules: the last {self.config.text_config.num_kv_shared_layers} layers of "
                "Gemma 4 take keys and values from earlier ones (num_kv_shared_layers of config.json), for all rows of "
                "a micro-batch at once; leave its decoder layers out"
            )
        if self._shares_keys and config.recompute_modules and config.use_reentrant:
            notice(
                f"{config.file}: recomputed with use_reentrant: false, because the reentrant way loses the gradients "
                "of keys and values that layers of Gemma 4 take from earlier ones (num_kv_shared_layers of config.json)"
            )
        units = listed_modules(self, config, "sub_modules_to_wrap")
        if self.config.text_config.hidden_size_per_layer_input and containing_path(_EMBEDDING, units) is not None:
            raise ConfigError(
                f"{config.file}: sub_modules_to_wrap: Gemma 4 with hidden_size_per_layer_input reads the weight of "
                f"'{_EMBEDDING}' outside of it; name its blocks ('model.language_model.layers.{{*}}'), and neither "
                "the embedding nor what contains it"
            )
