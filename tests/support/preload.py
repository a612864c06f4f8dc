"""Make what each worker would compute once for itself in the server that they are forked from."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen3")  # the first call compiles a thousand patterns for all families
