"""Recipes that make no sense as a whole: keys that would do nothing where they stand, and combinations that cannot work.

What a key may be is said where it is declared; here are the cross-checks. All of them need the recipe alone.
"""

from __future__ import annotations

from opd.config.stage import Recipe, Stage


def refuse_recipe(recipe: Recipe) -> None: ...


def refuse_stage(stage: Stage, where: str) -> None: ...
