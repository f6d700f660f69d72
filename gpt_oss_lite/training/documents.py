"""Which document each position of a window belongs to, for `model.document_mask`."""

import torch
from torch import Tensor

from gpt_oss_lite.config import ModelConfig
from shared_data.errors import UserError


def document_ids(ids_BT: Tensor, config: ModelConfig, eos_token_id: int | None) -> Tensor | None:
    """Number of the document at each position, (B, T) int64 from 0 in each window; an EOS ends its document.

    Returns:
        None unless config.document_mask.

    Raises:
        UserError: the corpus does not say what its EOS is (one file without a manifest).
    """
    if not config.document_mask:
        return None
    if eos_token_id is None:
        raise UserError("model.document_mask is true, but the corpus has no manifest that names its EOS id")
    is_eos_BT = (ids_BT == eos_token_id).to(torch.int64)
    return is_eos_BT.cumsum(dim=1) - is_eos_BT
