# Environment of a launch, by device. Sourced by launch scripts from the checkout's root:
#
#   source examples/env_config.sh                 # a run with FSDP2
#   MM_ROAD=ptd source examples/env_config.sh     # a run on Megatron-core (tensor or pipeline parallel)
#
# The device is MM_DEVICE (npu, cuda or cpu), else the best that is there. What the shell has set already stays, except
# CUDA_DEVICE_MAX_CONNECTIONS, which depends on the backend. `mindspeed-mm doctor` tells which values hurt.
# shellcheck shell=bash

mm_detect_device() {
    if [ -n "${MM_DEVICE:-}" ]; then
        echo "$MM_DEVICE"
    elif [ -e /dev/davinci_manager ] || command -v npu-smi >/dev/null 2>&1; then
        echo npu
    elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo cuda
    else
        echo cpu
    fi
}

mm_set_environment() {
    case "${MM_ROAD:-fsdp2}" in
        # FSDP2 gathers parameters beside computation: that takes a second queue between host and device.
        fsdp2) export CUDA_DEVICE_MAX_CONNECTIONS=2 ;;
        # Tensor parallelism overlaps only if kernels run in the order of their launch: one queue.
        ptd) export CUDA_DEVICE_MAX_CONNECTIONS=1 ;;
        *)
            echo "examples/env_config.sh: MM_ROAD is '$MM_ROAD'; expected fsdp2 or ptd" >&2
            return 1
            ;;
    esac

    # Loader workers are processes of their own: tokenizers must not start threads in each of them.
    export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

    case "$(mm_detect_device)" in
        npu) mm_set_npu ;;
        cuda) mm_set_cuda ;;
        *) mm_set_cpu ;;
    esac
}

mm_set_npu() {
    # CANN writes its log to files, errors only (0 debug, 1 info, 2 warnings, 3 errors), and leaves the console alone.
    export ASCEND_SLOG_PRINT_TO_STDOUT="${ASCEND_SLOG_PRINT_TO_STDOUT:-0}"
    export ASCEND_GLOBAL_LOG_LEVEL="${ASCEND_GLOBAL_LOG_LEVEL:-3}"
    # Operators are launched without waiting for them; 1 waits, to find the one that fails.
    export ASCEND_LAUNCH_BLOCKING="${ASCEND_LAUNCH_BLOCKING:-0}"
    # A second thread hands operators to the device; at level 2 it takes over their workspaces too, for a little memory.
    export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"
    # Two operators on tensors that don't lie in one piece are run as one.
    export COMBINED_ENABLE="${COMBINED_ENABLE:-1}"
    # The threads of each process stay on the cores of its device.
    export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"
    # Rows of many lengths make operators of many shapes: more of them are remembered (the default is 10000).
    export ACLNN_CACHE_LIMIT="${ACLNN_CACHE_LIMIT:-100000}"
    # Blocks of memory grow instead of lying about in pieces: less is lost between them.
    export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
    # Seconds that ranks wait for each other at the start; reading a large model takes longer than the default, 120.
    export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1200}"
}

mm_set_cuda() {
    # As PYTORCH_NPU_ALLOC_CONF above.
    export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
}

mm_set_cpu() {
    # The processes of this node share its cores.
    local cores threads
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
    threads=$((cores / ${NPUS_PER_NODE:-2}))
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
    # On one node gloo needs no network, and no answer to what this host's name means.
    if [ "${NNODES:-1}" = 1 ] && [ -d /sys/class/net/lo ]; then
        export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
    fi
}

mm_set_environment
