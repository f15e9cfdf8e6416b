"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import functools

BACKEND = "logra"


def register() -> None:
    """Make the backend known, and keep weights where vLLM's CPU kernels would pack and drop them."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if BACKEND in WeightTransferEngineFactory._registry:  # it loads plugins more than once
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "scaled.engine.transfer", "FactorTransfer")
    if current_platform.is_cpu():
        dispatch = utils.dispatch_cpu_unquantized_gemm

        @functools.wraps(dispatch)
        def keeping(layer, remove_weight):
            dispatch(layer, remove_weight=False)

        utils.dispatch_cpu_unquantized_gemm = keeping
