"""Every private name of vLLM 0.32 that the target's side of the split uses, but for the hook (`speculator_hook`)."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.qwen3_dflash import _get_dflash_fc_input_size
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from cluster.speculation.checkpoint import load_parameters, read_tensors

__all__ = ["DraftModelSpeculator", "FusedStates"]

_FC = re.compile(r"(?:.*\.)?fc\.(?P<parameter>.+)")


class FusedStates(nn.Module):
    """The draft's `fc` and nothing else of it: a target's auxiliary states [T, L·H_target] to the draft's [T, H].

    It runs on this side because its output is a fifth of its input, and it is built and loaded as the draft's model
    does it, so that the draft gets the same bits.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__()
        draft = vllm_config.speculative_config.draft_model_config
        with set_default_torch_dtype(vllm_config.model_config.dtype), device:
            self.fc = ReplicatedLinear(
                input_size=_get_dflash_fc_input_size(vllm_config),
                output_size=draft.get_hidden_size(),
                bias=False,
                params_dtype=vllm_config.model_config.dtype,
                quant_config=get_draft_quant_config(vllm_config),
                prefix="model.fc",
                return_bias=False,
            )
        folder = Path(draft.model)
        load_parameters(self.fc, read_tensors(folder, _parameter_of_fc), checkpoint=folder)
        process_weights_after_loading(self, draft, device)

    def forward(self, aux_hidden_states: list[torch.Tensor]) -> torch.Tensor:
        fused: torch.Tensor = self.fc(torch.cat(aux_hidden_states, dim=-1))
        return fused


def _parameter_of_fc(stored: str) -> str | None:
    match = _FC.fullmatch(stored)
    return match["parameter"] if match else None
