"""What every block of a recipe shares: strict types, no unknown key, immutable once made."""

from typing import Any, Self

import shared_data.yaml_files


class ConfigBlock(shared_data.yaml_files.ConfigBlock):
    """A block of a recipe. The doc string under a field is its description in docs/configuration.md."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked like a new one."""
        return type(self)(**{**self.model_dump(), **changes})
