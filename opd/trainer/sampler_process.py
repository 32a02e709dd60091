"""What a process that samples beside the trainer does: it is told once what to sample with, then asked again and again.

    here                                 imports, which is most of the time that it needs until it is ready
    trainer   weights, facts             the memory that has the newest ones; the model and the sampler's settings
    here      ready                      the model is loaded; parts are sent to those that will read them at once
    trainer   requests                   part of a batch, what there is of each rollout, and the log to write into
    here      drawn, drawn, …            how many tokens a step of the sampler has given; they are in the log
    here      kept                       all of them are finished and durable: where. The next part comes behind this
    here      failed                     why it cannot go on; a process that ends without a word is started again

All is bytes that hold no code (`trainer.messages`). It ends when the trainer does, however that ended: nobody reads any more. What it has
drawn by then is made durable first.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from opd.errors import OpdError
from opd.models import load_model
from opd.sampling import choose  # noqa: F401  (a sampler opens with it: everything is imported before there are facts)
from opd.sampling.ahead import AheadSampler
from opd.sampling.samplers import SAMPLERS, SamplerKind
from opd.sampling.shared_weights import SharedWeights
from opd.settings import by_hand
from opd.store import RolloutStore
from opd.store.records import COLUMNS
from opd.store.samplers import SamplerLog, folder_of
from opd.trainer.messages import read_message, write_message
from opd.types import Author, Finished, Rollout, SampledToken, SampleRequest

WEIGHTS = b"w"  # comes with their descriptor
READY, DRAWN, KEPT, FAILED = "ready", "drawn", "kept", "failed"
COMMIT_TOKENS = 512  # group commit: tokens buffered before they are written


def main(descriptor: int) -> None:
    """`descriptor`: of the socket on which the trainer is."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler's is for all; the trainer ends this one when it is done
    trainer = Connection(descriptor)  # closed by the end of the process, behind its last words
    try:
        with socket.socket(fileno=os.dup(descriptor)) as line:
            told, weights, _, _ = socket.recv_fds(line, len(WEIGHTS), 1)
        if told:  # else nobody needed this one
            _serve(trainer, weights[0])
    except (EOFError, ConnectionError):
        return  # nobody is there any more
    except OpdError as error:
        trainer.send_bytes(write_message((FAILED, str(error))))


def _serve(trainer: Connection, weights: int) -> None:
    facts: Mapping[str, Any] = read_message(trainer.recv_bytes())
    sampler = _opened(facts, weights)
    trainer.send_bytes(write_message((READY, None)))
    log: SamplerLog | None = None
    try:
        while True:
            (directory, number, id, segment_bytes), author, parts = read_message(trainer.recv_bytes())
            if log is None or log.number != number:
                if log is not None:
                    log.close()
                log = SamplerLog(
                    Path(directory),
                    number,
                    bytes.fromhex(id),
                    commit_ms=facts["commit_ms"],
                    sync=facts["fsync"] == "commit",
                    segment_bytes=segment_bytes,
                )
            names = {part[0].id: part[1] for part in parts}
            for count in _draw(log, sampler.sample(_begun(log, parts)), names, Author(author)):
                trainer.send_bytes(write_message((DRAWN, count)))
            log.commit(sync=True)
            trainer.send_bytes(write_message((KEPT, log.links(names.values()))))
    finally:
        if log is not None:
            log.close()


def _opened(facts: Mapping[str, Any], weights: int) -> Any:
    torch.set_num_threads(facts["threads"])
    model = load_model(facts["model"], revision=facts["revision"], dtype=facts["dtype"], device=facts["device"])
    kind = by_hand("sampler", Annotated[SamplerKind, SAMPLERS], facts["sampler"])
    copy = model.inference_copy(getattr(torch, kind.dtype) if kind.dtype else None)
    sampler = kind.open(copy, facts["max_length"], merge_stop=tuple(facts["stop_ids"]))
    layout: Mapping[str, Any] = facts["layout"]
    still = {name: tensor.detach() for name, tensor in copy.module.named_parameters() if name not in layout}
    return AheadSampler(sampler, SharedWeights(layout, weights, still), facts["in_flight"])


def part_of(requests: Sequence[SampleRequest], store: RolloutStore, log: int, author: Author) -> tuple[Any, ...]:
    """What the trainer asks for: everything that there is of these rollouts is durable by then, and so is the log's number."""
    begun: list[Rollout] = store.partial([request.id for request in requests])
    parts = []
    for request, rollout in zip(requests, begun, strict=True):
        columns = [getattr(rollout, name) for name, _ in COLUMNS] if rollout.response_ids.size else None
        names = store.names(rollout.id)
        parts.append((request, store.entries.number(rollout.id), names, rollout.prompt_ids, columns))
    directory = str(folder_of(store.directory, log).absolute())
    return (directory, log, store.sampler_log_id(log).hex(), store.segment_bytes), int(author), parts


def _begun(log: SamplerLog, parts: Sequence[tuple[Any, ...]]) -> list[SampleRequest]:
    """In this log, with all that is written of them; each request goes on behind that."""
    wanted = []
    for request, number, names, prompt_ids, columns in parts:
        log.begin(number, names, prompt_ids, columns)
        wanted.append(request if columns is None else replace(request, prefix_ids=columns[0]))
    return wanted


def _draw(
    log: SamplerLog, events: Iterable[SampledToken | Finished], names: Mapping[str, int], author: Author
) -> Iterator[int]:
    """Into the log, the tokens of one step together, at most one of each request; how many these were."""
    drawn: dict[str, SampledToken] = {}
    waiting = 0

    def keep() -> int:
        nonlocal waiting
        count = len(drawn)
        if drawn:
            ids, *columns = zip(*drawn.values(), strict=True)
            log.append([names[id] for id in ids], [*map(np.array, columns), int(author)])
            drawn.clear()
        waiting += count
        if waiting >= COMMIT_TOKENS:
            log.commit()
            waiting = 0
        return count

    try:
        for event in events:
            count = keep() if event.request_id in drawn else 0
            if isinstance(event, Finished):
                log.finish(names[event.request_id], event.stop)
            else:
                drawn[event.request_id] = event
            if count:
                yield count
    finally:
        last = keep()
    yield last
