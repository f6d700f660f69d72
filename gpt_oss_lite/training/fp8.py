"""The head's products in 8-bit floats, where the card has them: twice the rate of bf16 for two of the three.

Logits are made from hidden states and head in E4M3, and the hidden states' gradient from the logits' gradient in E5M2
(Micikevicius et al., 2022, "FP8 formats for deep learning"). Both matrices are scaled by their largest magnitude; the
logits' gradient, which lies in [-1, 1] and mostly near 1 / V, by a power of two that keeps it in E5M2's range. The
head's own gradient stays a bf16 product: the card multiplies 8-bit floats only along rows, and it would need a
transposed copy of the whole chunk.

Hopper's fast accumulation keeps some 14 bits of a sum (DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report"), which serves
the logits' D terms. The hidden states' gradient has V, most of them tiny beside the target's: it takes the exact one.

Shapes: C tokens of a chunk, D width, V vocabulary rows.
"""

import torch
from torch import Tensor

from gpt_oss_lite.config import Recipe
from gpt_oss_lite.training.rounding import times
from shared_data.errors import UserError

GRADIENT_SCALE = 2.0**15
GRADIENT_DTYPE = torch.float8_e5m2
HEAD_CAPABILITY = (8, 9)
"""The least."""
EXPERTS_CAPABILITY = (9, 0)
"""The one: PyTorch 2.11 has grouped products with a scale for each row for Hopper, and none for later cards."""
_E4M3_MAX = 448.0


def check_fp8(recipe: Recipe, device: torch.device) -> None:
    """Refuse `training.fp8_head` and `model.moe_dispatch: grouped_fp8` on a device without such products.

    Raises:
        UserError: the device is no GPU, or one that has not those of a key that is set; the line has every such key.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    refused = []
    if recipe.training.fp8_head and capability < HEAD_CAPABILITY:
        refused.append(_needs("training.fp8_head is true", "8.9 or later (Ada, Hopper)", "false"))
    if recipe.model.moe_dispatch == "grouped_fp8" and capability != EXPERTS_CAPABILITY:
        refused.append(_needs("model.moe_dispatch is grouped_fp8", "9.0 (Hopper)", "auto"))
    if refused:
        there = f"the device is {device.type}"
        if device.type == "cuda":
            there = f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}"
        raise UserError(f"{there}; {'; '.join(refused)}")


def _needs(chosen: str, allowed: str, instead: str) -> str:
    return f"{chosen}: it needs a GPU of compute capability {allowed}, set it to {instead}"


def _quantized(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in E4M3 and the fp32 scalar that it is to be multiplied by; the largest magnitude becomes E4M3's."""
    scale = torch.linalg.vector_norm(x_ND, float("inf"), dtype=torch.float32).clamp(min=1e-12) / _E4M3_MAX
    return times(x_ND, scale.reciprocal(), out=torch.empty_like(x_ND, dtype=torch.float8_e4m3fn)), scale


class Fp8Head:
    """A head's matrix (V, D), any float dtype, ready for the products of one micro-batch."""

    def __init__(self, weight_VD: Tensor) -> None:
        self._w_VD, self._scale = _quantized(weight_VD)
        self._w_DV = self._w_VD.t().contiguous()
        self._gradient_scale = torch.full_like(self._scale, 1 / GRADIENT_SCALE)

    def logits(self, h_CD: Tensor) -> Tensor:
        """h @ w^T, (C, V) in h's dtype."""
        h8_CD, scale = _quantized(h_CD)
        return torch._scaled_mm(
            h8_CD, self._w_VD.t(), scale, self._scale, out_dtype=h_CD.dtype, use_fast_accum=h_CD.is_cuda
        )

    def input_gradient(self, gradient_CV: Tensor, dtype: torch.dtype) -> Tensor:
        """g @ w, (C, D) in `dtype`, of gradients that are in E5M2 and times GRADIENT_SCALE."""
        return torch._scaled_mm(
            gradient_CV, self._w_DV.t(), self._gradient_scale, self._scale, out_dtype=dtype, use_fast_accum=False
        )
