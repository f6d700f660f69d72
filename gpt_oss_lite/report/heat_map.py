"""Expert load over layers and time as a small palette image; blue takes less than its share, orange more.

The image has one column for each span of rows and one row for each expert, layers one below the other with a
transparent row between them. PNG as in RFC 2083; a palette image lets light and dark screens share the pixels.

Shapes: N rows, L layers, E experts, C columns.
"""

import base64
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpt_oss_lite.report.curves import bucket_means

MAX_COLUMNS = 160
MAX_CELLS = 60_000
BALANCED = 128
"""Palette index of an expert with exactly its share; 0 is no figure, 1 no token at all, 255 `CEILING` or more."""
CEILING = 3.0

# Less than its share, balanced, more; each clearly lighter or darker than the page when far from balance.
LIGHT = ((8, 81, 156), (243, 243, 240), (179, 60, 0))
DARK = ((120, 190, 250), (34, 38, 44), (255, 166, 77))


@dataclass(frozen=True)
class HeatMap:
    """Quantised loads and where the columns lie."""

    cells_LEC: npt.NDArray[np.uint8]
    first_rows: list[int]
    """Row of the log that begins each column, and the number of rows at the end."""

    def png(self, dark: bool) -> str:
        """A data URI."""
        gap_1C = np.zeros((1, self.cells_LEC.shape[2]), np.uint8)
        parts = [part for layer_EC in self.cells_LEC for part in (layer_EC, gap_1C)][:-1]
        return (
            "data:image/png;base64," + base64.b64encode(_png(np.concatenate(parts), DARK if dark else LIGHT)).decode()
        )

    def cells(self) -> str:
        """The quantised loads in base64, layer by layer, expert by expert."""
        return base64.b64encode(self.cells_LEC.tobytes()).decode()


def heat_map(load_NLE: npt.NDArray[np.float64]) -> HeatMap | None:
    """Means of the load over spans of rows, as multiples of a balanced share; None without any."""
    n_rows, n_layers, n_experts = load_NLE.shape
    known = np.isfinite(load_NLE).all(axis=(1, 2)) if load_NLE.size else np.zeros(n_rows, bool)
    if not known.any():
        return None
    columns = max(1, min(MAX_COLUMNS, n_rows, MAX_CELLS // (n_layers * n_experts)))
    load_CLE, edges = bucket_means(load_NLE, columns)
    return HeatMap(quantise(load_CLE.transpose(1, 2, 0) * n_experts), edges.tolist())


def quantise(ratio: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Palette index of a load that is a multiple of a balanced share; NaN is 0."""
    under = 1 + (BALANCED - 1) * ratio
    over = BALANCED + (255 - BALANCED) * (ratio - 1) / (CEILING - 1)
    index = np.where(ratio <= 1, under, over).clip(1, 255)
    return np.where(np.isfinite(ratio), index, 0).round().astype(np.uint8)


def _png(pixels_HW: npt.NDArray[np.uint8], ends: tuple[tuple[int, int, int], ...]) -> bytes:
    """A palette image, index 0 transparent."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = pixels_HW.shape
    position = np.array([1, BALANCED, 255])
    palette = np.stack([np.interp(np.arange(256), position, channel) for channel in zip(*ends, strict=True)], axis=1)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels_HW], axis=1)  # 0: no filter on this line
    return b"".join([
        b"\x89PNG\r\n\x1a\n",
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        chunk(b"PLTE", palette.round().astype(np.uint8).tobytes()),
        chunk(b"tRNS", b"\x00"),
        chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
        chunk(b"IEND", b""),
    ])  # fmt: skip
