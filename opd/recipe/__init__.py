"""The recipe: its schema (`stage`, `objective`) and how it is read (`read`). No torch here.

A recipe is YAML. An unknown key is an error that names the most similar known key.
"""

from opd.objective.term import Term
from opd.recipe.plain_data import parse_yaml
from opd.recipe.read import (
    FAMILIES,
    STAGE_PREFIX,
    as_begun_in,
    find_recipe,
    load_begun,
    load_recipe,
    recipe_facts,
    recipe_schema,
    recipe_text,
    resolve,
    shipped_recipes,
    validate,
)
from opd.recipe.stage import Checkpoint, Data, Eval, Hub, Log, Lora, Recipe, Rollouts, Stage, Store, Student, Train

__all__ = [
    "FAMILIES",
    "STAGE_PREFIX",
    "Checkpoint",
    "Data",
    "Eval",
    "Hub",
    "Log",
    "Lora",
    "Recipe",
    "Rollouts",
    "Stage",
    "Store",
    "Student",
    "Term",
    "Train",
    "as_begun_in",
    "find_recipe",
    "load_begun",
    "load_recipe",
    "parse_yaml",
    "recipe_facts",
    "recipe_schema",
    "recipe_text",
    "resolve",
    "shipped_recipes",
    "validate",
]
