"""Pictures as files."""

from pathlib import Path
from typing import Any

from shared_data.errors import require_extra
from shared_data.files import atomic_writer


def save_picture(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as PNG or SVG, as the path's suffix says, whole or not at all.

    The same figure gives the same bytes: no date, and no random ids in an SVG, whose text stays text.

    Raises:
        UserError: matplotlib is not installed.
    """
    matplotlib = require_extra("matplotlib", "plot")
    kind = path.suffix[1:].lower()
    with (
        matplotlib.rc_context({"svg.hashsalt": "gpt-oss-lite", "svg.fonttype": "none"}),
        atomic_writer(path) as file,
    ):
        figure.savefig(file, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
