"""Start Megatron-core's parallel state in a worker."""

from __future__ import annotations


def start(tensor_parallel: int = 1) -> None:
    """Make this process fit for megatron-core and split its ranks; in a pool's worker, anew for each function."""
    from mindspeed_mm import accelerator

    accelerator.prepare_megatron()
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as mcore

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_parallel)
    mcore.model_parallel_cuda_manual_seed(1)
