"""What every block of a recipe shares: strict types, no unknown key, immutable once made."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class ConfigBlock(BaseModel):
    """A block of a recipe. Wrong input raises pydantic's ValidationError, which is a ValueError.

    The doc string under a field is its description in docs/configuration.md.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked like a new one."""
        return type(self)(**{**self.model_dump(), **changes})
