"""Documents inside a window: which tokens belong together, and where each stands in its document.

Shapes: B batch, T tokens.
"""

import torch
from torch import Tensor


def document_ids(ids_BT: Tensor, eos_token_id: int) -> Tensor:
    """Number the documents of each window from 0; an end-of-document token belongs to the document that it ends.

    Args:
        ids_BT: token ids, any integer dtype.
        eos_token_id: the id that ends a document.

    Returns:
        (B, T) int64, not decreasing along T.
    """
    ends_BT = (ids_BT == eos_token_id).long()
    return ends_BT.cumsum(dim=1) - ends_BT


def positions_in_documents(document_ids_BT: Tensor) -> Tensor:
    """Position of each token from the start of its document (or of the window, where the document began before it).

    Args:
        document_ids_BT: as from `document_ids`; equal numbers must be neighbours.

    Returns:
        (B, T) int64.
    """
    positions_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    starts_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    return positions_T - torch.where(starts_BT, positions_T, 0).cummax(dim=1).values
