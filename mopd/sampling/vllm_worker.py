"""What runs inside vLLM's workers: taking the student's weights from a published folder.

vLLM loads this module as a worker extension (`WORKER_EXTENSION` of mopd/sampling/vllm_weights.py); that also makes the weight
transfer back end `mopd_file` known there. Only vLLM processes import it.
"""

from __future__ import annotations

import dataclasses

from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from mopd.sampling.vllm_weights import FILE_BACKEND
from mopd.sampling.weight_folder import folder_weights


def rebuild_expert_kernels(model) -> int:
    """Have every MoE layer that computes on the CPU build its kernel anew at the next load; returns how many there are.

    The CPU kernel keeps the expert matrices in a packed copy of its own, which is made where there is no kernel yet. A reload
    over an existing one leaves the old experts in use, without a word (vLLM 0.32, `UnquantizedFusedMoEMethod._setup_kernel`).
    """
    count = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None
            count += 1
    return count


def rebuild_heads(model) -> int:
    """After a load, have output heads on the CPU pack their matrix anew; returns how many there are.

    A head that is tied to the embedding gets no weights of its own, so the reload leaves its packed copy of the old ones in
    use (its matrix, which it shares, is new).
    """
    count = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod) and module.weight.device.type == "cpu":
            method.process_weights_after_loading(module)
            count += 1
    return count


class WeightsExtension:
    """Methods of every worker; the worker's own names stay free."""

    def mopd_take_folder(self, folder: str) -> None:
        """Load a published folder in place. Raises WeightFolderError, before anything is changed, where it is not whole."""
        weights = folder_weights(folder)
        rebuild_expert_kernels(self.model_runner.get_model())
        self.reload_weights(weights_iterator=weights)
        rebuild_heads(self.model_runner.get_model())


@dataclasses.dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclasses.dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """A published folder, as this machine sees it."""

    folder: str


class FileTransfer(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """vLLM's weight transfer through a folder of safetensors that the server's machine sees."""

    init_info_cls, update_info_cls = FileInitInfo, FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """The layers wait for their weights from here on."""
        rebuild_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        """Load a whole version; there is no second part."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        self.model.load_weights(folder_weights(update_info.folder))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        rebuild_heads(self.model)

    def shutdown(self) -> None:
        pass


if FILE_BACKEND not in WeightTransferEngineFactory._registry:  # a worker may be made twice in one process
    WeightTransferEngineFactory.register_engine(FILE_BACKEND, FileTransfer)
