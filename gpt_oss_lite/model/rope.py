"""Rotary positions (Su et al., 2021, half-split pairs) with the YaRN extension (Peng et al., 2023), as in gpt-oss.

At scale 1 these are plain rotary positions. At scale s the pairs that turn seldom are slowed down s-fold, those that
turn often are left alone, a linear ramp lies between, and cos and sin grow by 0.1 ln(s) + 1. The tables depend on the
scale alone, never on the number of tokens.

Shapes: B batch, T tokens, H heads, C head width, P = C / 2 pairs.
"""

import math

import torch
from torch import Tensor

from gpt_oss_lite.config import ModelConfig
from shared_data.errors import UserError

RotaryTables = tuple[Tensor, Tensor]
"""cos and sin, each (T, P) or (B, T, P), fp32."""


def yarn_frequencies(
    head_dim: int, theta: float, scale: float, original_context: int, beta_fast: float, beta_slow: float
) -> tuple[Tensor, float]:
    """Angles per position and the factor on cos and sin.

    Args:
        head_dim: width of a head, even.
        theta: base of the angles.
        scale: by how much the context is extended; 1 is plain RoPE.
        original_context: tokens of the context before the extension.
        beta_fast: pairs that turn more often than this in the original context keep their frequency.
        beta_slow: pairs that turn less often than this in the original context are slowed down in full.

    Returns:
        Frequencies (P,) fp32 on the CPU in radians per position, and the attention factor. The bounds of the ramp are
        not rounded (transformers' `truncate: false`), and the arithmetic is transformers', so that an exported model
        turns by the same angles to the last bit.
    """
    # The device is named: a model that is built on the meta device still needs the numbers.
    exponents_P = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    periods_P = theta**exponents_P
    frequencies_P = 1.0 / periods_P
    if scale == 1.0:
        return frequencies_P, 1.0

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(pair_that_turns(beta_fast), 0)
    high = min(pair_that_turns(beta_slow), head_dim - 1)
    if low == high:
        high += 0.001
    pairs_P = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    kept_P = 1 - ((pairs_P - low) / (high - low)).clamp(0, 1)
    slowed_P = 1.0 / (scale * periods_P)
    return slowed_P * (1 - kept_P) + frequencies_P * kept_P, 0.1 * math.log(scale) + 1.0


class RotaryEmbedding:
    """Makes the tables of cos and sin at a scale that can be changed between calls.

    Not a module: the frequencies follow from the config, so they are neither saved nor left undefined when a model that
    was built on the meta device gets its memory.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.set_scale(config.rope_scale)

    def set_scale(self, scale: float) -> None:
        """Use another YaRN scale from now on.

        Raises:
            UserError: the scale is below 1 or not finite.
        """
        if not (math.isfinite(scale) and scale >= 1):
            raise UserError(f"the RoPE scale is {scale}: it must be a finite number of at least 1")
        config = self._config
        self.scale = float(scale)
        self._frequencies_P, self._attention_factor = yarn_frequencies(
            config.head_dim,
            config.rope_theta,
            self.scale,
            config.original_context,
            config.yarn_beta_fast,
            config.yarn_beta_slow,
        )

    def tables(self, positions: Tensor) -> RotaryTables:
        """cos and sin, fp32, (*positions.shape, P), for integer positions of any shape, on their device."""
        if self._frequencies_P.device != positions.device:  # one copy per device, not one per step
            self._frequencies_P = self._frequencies_P.to(positions.device)
        angles = positions[..., None].float() * self._frequencies_P
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor


def rotate(x_BTHC: Tensor, tables: RotaryTables) -> Tensor:
    """Turn the pairs (i, i + P) of each head by its position's angle; in fp32 at least, back in x's dtype."""
    cos, sin = (table.unsqueeze(-2) for table in tables)
    first, second = x_BTHC.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHC.dtype)
