"""A view for teachers with another tokenizer: they read the same text in their own tokens. No torch here.

The prompt goes through the teacher's own template and tokenizer, and the response is cut into its tokens. Spans pair the tokens of
both that cover the same bytes; each is one event, whose probability is the product over its tokens. The stop is an event, too.

Where a text was cut, the teacher's tokens at its end are those of the cut text: "1" where it would have written "18". What they
cover is left out.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from opd.models.token_bytes import Span, common_spans, open_end, pieces, readable
from opd.teachers.views import Group, View
from opd.types import Prompt, Rendered, Rollout


class BytesView(View):
    """The response in the teacher's own tokens, paired with the student's by the bytes they cover."""

    name = "bytes"
    crosses = True
    reprompts = False  # what it shows is in other ids
    chat_template: Literal["teacher"] = Field("teacher", description="of bytes: always the teacher's own")

    def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
        from opd.data.render import ids_behind

        response, stopped = _without_stop(rollout.response_ids, group.stop_ids)
        asked, ours = group.prompt_ids(prompt), pieces(group.student, response)
        whole = b"".join(ours)
        text = readable(whole)
        theirs = ids_behind(prompt, text, group.tokenizer, group.template_kwargs) if text else []
        read = pieces(group.tokenizer, theirs)
        spans, start = common_spans(ours, read), asked.size
        complete, cut = _reaches_both_ends(spans, len(ours), len(theirs)), 0
        if rollout.stop == "length" or len(text.encode()) < len(whole):
            kept = _before_open_end(spans, read, group.tokenizer)
            cut = sum(s1 - max(s0, self.skip) for s0, s1, _, _ in spans[len(kept) :] if s1 > self.skip)
            spans = kept
        eos = group.tokenizer.eos_token_id
        if stopped and complete and eos is not None:
            spans, theirs = [*spans, (len(ours), len(ours) + 1, len(theirs), len(theirs) + 1)], [*theirs, eos]
        placed = tuple((s0, s1, start + t0, start + t1) for s0, s1, t0, t1 in spans if s0 >= self.skip)
        if rollout.response_ids.size and not placed and not cut:
            return None
        ids = np.concatenate([asked, np.asarray(theirs, dtype=np.int32)])
        return Rendered(ids, placed, self.name, crossed=True, cut=cut)


def _before_open_end(spans: list[Span], theirs: list[bytes], tokenizer: object) -> list[Span]:
    """The spans that the teacher would cut in the same way whatever came next."""
    ends, last = np.cumsum([len(piece) for piece in theirs]), open_end(tokenizer, b"".join(theirs))
    return [span for span in spans if ends[span[3] - 1] <= last]


def _without_stop(ids: np.ndarray, stop_ids: tuple[int, ...]) -> tuple[np.ndarray, bool]:
    stopped = bool(ids.size) and int(ids[-1]) in stop_ids
    return (ids[:-1] if stopped else ids), stopped


def _reaches_both_ends(spans: list[Span], ours: int, theirs: int) -> bool:
    return (spans[-1][1], spans[-1][3]) == (ours, theirs) if spans else not ours and not theirs


def aligned_bytes(rollout: Rollout, text: Rendered, student: object, stop_ids: tuple[int, ...]) -> tuple[int, int]:
    """(bytes of a response in spans, bytes of the response)."""
    response, _ = _without_stop(rollout.response_ids, stop_ids)
    sizes = np.array([len(piece) for piece in pieces(student, response)], dtype=np.int64)
    inside = np.zeros(sizes.size, dtype=bool)
    for s0, s1, _, _ in text.spans:
        inside[s0 : min(s1, sizes.size)] = True
    end = text.spans[-1][1] if text.spans else 0
    inside[end : end + text.cut] = True  # what was left out at a cut is aligned, too
    return int(sizes[inside].sum()), int(sizes.sum())
