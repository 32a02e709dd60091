"""A plugin of the type checker that notes where attributes of the package's classes are read: file, line, class and attribute."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mypy.plugin import AttributeContext, Plugin
from mypy.types import Type


class AttributeReads(Plugin):
    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        if not fullname.startswith("opd."):
            return None

        def note(context: AttributeContext) -> Type:
            if not context.is_lvalue:
                path = context.api.path  # type: ignore[attr-defined]
                with Path(os.environ["ATTRIBUTE_READS"]).open("a", encoding="utf-8") as file:
                    file.write(f"{path}\t{context.context.line}\t{fullname}\n")
            return context.default_attr_type

        return note


def plugin(version: str) -> type[Plugin]:
    return AttributeReads
