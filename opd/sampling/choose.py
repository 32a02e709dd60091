"""Which sampler a model gets: the engine where its keys and values fit into slots, else one request at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from opd.errors import ModelError
from opd.models.attention import Packed, Unknown
from opd.models.language_model import LanguageModel
from opd.models.probe import FOREIGN, FOREIGN_LAYERS, far, narrow_windows, takes_our_attention
from opd.models.routes import PackedRoute
from opd.sampling.engine import Engine, choose_settings
from opd.sampling.graphs import Partner
from opd.sampling.plain import PlainSampler
from opd.sampling.samplers import BuiltInSampler
from opd.sampling.slots import SlotCache, SlotLayout
from opd.text import first_line

log = logging.getLogger(__name__)

LENGTH = 9  # tokens of each of the probe's two sequences


def open_sampler(
    model: LanguageModel,
    spec: BuiltInSampler,
    max_length: int,
    *,
    merge_stop: tuple[int, ...],
    partner: Partner | None = None,
) -> Engine | PlainSampler:
    """The sampler takes the model over: give it an `inference_copy`. It gets as many of its slots as there is memory for."""
    if partner is not None:
        require_slots([model, partner.model], max_length)
    why = unfit_for_slots(model, max_length)
    if why:
        return PlainSampler(model, max_length, merge_stop=merge_stop, why=why)
    while True:
        try:
            return Engine(model, spec, max_length, merge_stop=merge_stop, partner=partner)
        except torch.OutOfMemoryError:
            slots = choose_settings(model, spec, partner).slots
            if slots == 1:
                raise
        log.warning("%s: no memory for %s slots; trying half as many", model.name, slots)
        spec = spec.model_copy(update={"slots": slots // 2})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def require_slots(models: Sequence[LanguageModel], max_length: int) -> None:
    """Refuse models that cannot read along with each other, token by token."""
    for model in models:
        why = unfit_for_slots(model, max_length)
        if why:
            raise ModelError(
                f"rollout.teacher_mix draws from two models at once, and {model.name} samples one request at a time "
                f"({why}). Set teacher_mix: 0."
            )


def unfit_for_slots(model: LanguageModel, max_length: int) -> str:
    """Why a model cannot sample through slots, or nothing."""
    route = model.route
    if not isinstance(route, PackedRoute):
        return route.why
    if not takes_our_attention(model):
        return FOREIGN_LAYERS
    if route.limit is not None and max_length > route.limit:
        return (
            f"sequences of {max_length} tokens are longer than the {route.limit} for which its rotary frequencies are "
            "fixed"
        )
    return _wrong_in_slots(model)


def _wrong_in_slots(model: LanguageModel) -> str:
    try:
        with torch.no_grad(), narrow_windows(model.module):
            pairs = _probe(model)
    except Unknown as reason:
        return str(reason)
    except torch.OutOfMemoryError:
        raise
    except FOREIGN as error:
        return f"it does not take our cache ({first_line(error)})"
    wrong = any(far(ours, whole, model.dtype) for ours, whole in pairs)
    return "its cache is not plain keys and values" if wrong else ""


def _probe(model: LanguageModel) -> list[tuple[Tensor, Tensor]]:
    """Two slots, prefilled in pieces and decoded at different columns, against both sequences at once."""
    device = model.device
    ids_T = torch.linspace(1, model.size - 1, 2 * LENGTH, device=device).long()
    first, second = ids_T.roll(LENGTH // 2).split(LENGTH)
    whole = model.project(model.hidden(torch.cat([first, second]), Packed.of([LENGTH] * 2, device))).logits()
    cache = SlotCache(model.module.config.num_hidden_layers, slots=3, width=2 * LENGTH)

    def call(ids: Tensor, slots: list[int], columns: Tensor, in_order: bool) -> Tensor:
        cache.layout = layout = SlotLayout(torch.tensor(slots, device=device), columns, 2 * LENGTH, in_order)
        out = model.backbone(
            input_ids=ids, position_ids=columns, past_key_values=cache, use_cache=True, layout=layout
        ).last_hidden_state
        return model.project(out.flatten(0, 1)).logits()

    span = torch.arange(LENGTH, device=device)
    begun = call(torch.stack([first[:6], second[:6]]), [0, 1], span[:6].repeat(2, 1), in_order=False)
    more = call(second[None, 6:8], [1], span[None, 6:8], in_order=False)
    decoded = call(torch.stack([first[6:7], second[8:9]]), [0, 1], torch.stack([span[6:7], span[8:9]]), in_order=True)
    return [
        (begun, torch.cat([whole[:6], whole[LENGTH : LENGTH + 6]])),
        (more, whole[LENGTH + 6 : LENGTH + 8]),
        (decoded, torch.stack([whole[6], whole[LENGTH + 8]])),
    ]
