"""Recipes: what a run is made of, typed and checked. Imports neither torch nor any optional package."""

from gpt_oss_lite.config.model import ModelConfig
from gpt_oss_lite.config.recipe import dump_recipe, load_recipe
from gpt_oss_lite.config.training import DataConfig, Recipe, TrainingConfig

__all__ = ["DataConfig", "ModelConfig", "Recipe", "TrainingConfig", "dump_recipe", "load_recipe"]
