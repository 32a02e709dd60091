"""Parameters that get no gradient from any loss: they only choose tokens or experts, and a choice has no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opd.models.settings import Lora


INDEXER = "Indexer"  # in the class names of modules that choose the tokens attention reads (DeepSeek-V3.2, GLM-MoE-DSA)
BALANCE = frozenset({"e_score_correction_bias", "expert_bias"})  # added to a router's scores only for its choice


def untrained_parameters(module: Any) -> dict[str, str]:
    """Parameter name -> what it belongs to. Found by class and parameter names, so no weights are needed."""
    found = {
        f"{place}.{name}": "indexers, which choose the tokens that attention reads,"
        for place, part in module.named_modules()
        if INDEXER in type(part).__name__
        for name, _ in part.named_parameters()
    }
    balances = [name for name, _ in module.named_parameters() if name.rpartition(".")[2] in BALANCE]
    return found | dict.fromkeys(balances, "biases with which routers choose experts")


def untrained_notes(module: Any, lora: Lora | None) -> list[str]:
    """Notes for the user before training. With adapters, only if one is on such a parameter."""
    names = untrained_parameters(module)
    if lora is not None and names:
        from opd.models.lora import find_targets

        adapted = find_targets(module, module.get_output_embeddings(), lora).weights
        names = {name: what for name, what in names.items() if name in adapted}
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    notes = []
    for what in dict.fromkeys(names.values()):
        those = [name for name, kind in names.items() if kind == what]
        count, more = sum(sizes[name] for name in those), f" and {len(those) - 1} more" if len(those) > 1 else ""
        end = (
            "they stay as they are in the checkpoint"
            if lora is None
            else "adapters on them learn nothing: leave them out of lora.targets"
        )
        notes.append(
            f"{what} are not trained ({those[0]}{more}, {count:,} parameters): a choice has no gradient, so {end}"
        )
    return notes
