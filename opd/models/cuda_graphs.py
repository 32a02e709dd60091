"""CUDA graphs: calls that are recorded once and then launched as one.

Recording holds the lock `RECORDING`. A recording empties the allocator's cache when it begins, which would end a recording of
another thread (`rollout.staleness`). `waits_for_the_device` runs once per model, before other threads start: it makes a wait in
any thread an error.

Graphs of two owners may run at the same time, so they must not share scratch memory for matrix products. That memory belongs to a
thread's handle and a stream, so each owner warms up and records on its own stream. Garbage collection is off during a recording:
freeing a graph would end it.
"""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opd.common.text import first_line
from opd.divergences.projection import upload
from opd.models import attention
from opd.models.attention import FOREIGN, LENGTHS, Packed, PackedRoute, Unknown, rotary_limit, takes_our_attention
from opd.models.fused_layers import why_stock
from opd.models.language_model import decoder_layers

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel


T = TypeVar("T")
# (call, memory pool, stream) -> the recorded graph
Recorder = Callable[[Callable[[], object], Any, Any], Any]
RECORDING = threading.RLock()  # one for the process
FAILED: list[Any] = []  # graphs whose recording failed: the allocator of pinned memory keeps querying them


def record(call: Callable[[], object], pool: Any, stream: torch.cuda.Stream) -> Any:
    """Record a call as a graph. It must have run on that stream before, so that kernels are compiled and libraries initialised.

    `pool`: memory shared with graphs that never run at the same time. Other threads may use the device meanwhile. If a recording
    fails, the random state and the device's memory are restored; its pool cannot be used for another.
    """
    graph, before, device = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    with RECORDING, _no_garbage():
        numbers = generator.clone_state()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                call()
        except BaseException:
            torch.cuda.set_stream(before)
            _end_allocating(device, pool)
            FAILED.append(graph)
            # the generator's own state would wait for the end of the recording, and every draw would fail
            generator.graphsafe_set_state(numbers)
            raise
    return graph


def _end_allocating(device: int, pool: Any) -> None:
    """Clean up after a failed recording: the allocator may believe it is still under way, and keep freed memory."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError as error:
        if "not currently recording" not in str(error):
            raise


@contextmanager
def _no_garbage() -> Iterator[None]:
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for all recordings of one owner. Torch hands out 32 streams of this priority in turn; nothing else uses them."""
    return torch.cuda.Stream(device, priority=-1)


def on_stream(stream: torch.cuda.Stream | None, call: Callable[[], T]) -> T:
    """Run a call on the stream of an owner's recordings, so that libraries set up their state for it. None: there is no GPU."""
    if stream is None:
        return call()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        found = call()
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    return found


def on_device(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def waits_for_the_device(call: Callable[[], object]) -> str:
    """Run the call. Return the first error about the host waiting for the device (some rotary embeddings, some experts), or ""."""
    with RECORDING:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")  # torch warns that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""


# --- Forward and backward passes of small batches as CUDA graphs ---
#
# A pass is hundreds of kernel launches. For small batches the host takes longer over them than the device.
#
# model.graphs = PassGraphs.of(model)       # None: its passes cannot be recorded
# model.graphs.hidden(ids_T, layout)        # None: this batch is not recorded; run it the usual way
#
# Batches are padded to a few sizes with dummy sequences. A size is recorded when it is seen for the second time. Gradients come
# from a second graph. The embedding lookup stays outside: a recorded pass begins with its rows.


log = logging.getLogger(__name__)

MOST_WORK = 4e12  # parameters times tokens of a pass; above it the device takes longer than the host
FINENESS = 4  # sizes between one power of two and the next
FEWEST_TOKENS = 256
KEPT = 8  # recorded sizes per model
ROOM = 0.1  # fraction of the device's memory that a model's graphs may keep
CLOSE = 0.05  # relative error that half precision explains


class PassSize(NamedTuple):
    """The size that a batch is padded to."""

    tokens: int
    sequences: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> PassSize:
        count = max(sum(lengths), FEWEST_TOKENS)
        step = (1 << count.bit_length() - 1) // FINENESS
        tokens, longest = -(-count // step) * step, _power_of_2(max(lengths))
        padding = -(-(tokens - sum(lengths)) // longest)
        return cls(tokens, _power_of_2(max(len(lengths) + padding, 8)), longest)

    def bounds(self, lengths: Sequence[int]) -> np.ndarray:
        """(sequences + 1,): the batch's sequences, its padding as further sequences, then empty ones."""
        cuts = np.arange(sum(lengths), self.tokens, self.longest)
        ends = [*np.cumsum(lengths), *cuts[1:], *([self.tokens] if len(cuts) else [])]
        return np.array([0, *ends, *[self.tokens] * (self.sequences - len(ends))], dtype=np.int32)


def _power_of_2(number: int) -> int:
    """The smallest power of two that is at least as large."""
    return 1 << (number - 1).bit_length()


class FixedLayout(Packed):
    """The layout of a recorded pass: static tensors, filled with other sequences each time."""

    def attend_padded(self, *args: Any) -> Tensor:
        raise Unknown("its attention has to know how long sequences are before it begins")


# (rows of embeddings, layout, trainable weights) -> hidden states
Compute = Callable[[Tensor, FixedLayout, Mapping[str, Tensor]], Tensor]


class RecordedPass:
    """A pass of one size, and its gradient: static inputs, and graphs that read them."""

    def __init__(self, run: Compute, size: PassSize, like: Tensor, learns: bool) -> None:
        device = like.device
        self._run, self.size, self.learns = run, size, learns
        self.embedded = torch.zeros(size.tokens, like.shape[1], dtype=like.dtype, device=device)
        self.positions = torch.zeros(size.tokens, dtype=torch.int64, device=device)
        bounds = torch.zeros(size.sequences + 1, dtype=torch.int32, device=device)
        self.layout = FixedLayout((size.longest,), self.positions, self.positions, bounds, ())
        self.weights: dict[str, nn.Parameter] = {}
        self._leaves: list[Tensor] = []
        self.out = self.grad = self.embedded
        self.grads: tuple[Tensor | None, ...] = ()

    @torch.no_grad()
    def fill(self, embedded_T: Tensor, layout: Packed) -> None:
        count = embedded_T.shape[0]
        for static, values in ((self.embedded, embedded_T), (self.positions, layout.positions)):
            static[:count].copy_(values)
            static[count:].zero_()  # any finite value will do: its gradient is 0
        self.layout.bounds.copy_(upload(self.size.bounds(layout.lengths), self.positions.device))

    def forward(self) -> None:
        """Every pass has its own leaf tensors over the weights' memory. Autograd binds a leaf's gradient to the stream that first
        used it, as long as a loss of it is alive, and a recording must not wait for another stream.
        """
        start = self.embedded.detach().requires_grad_(self.learns)
        weights = {name: weight.detach().requires_grad_() for name, weight in self.weights.items()}
        self._leaves = [start, *weights.values()]
        with torch.set_grad_enabled(self.learns):
            self.out = self._run(start, self.layout, weights)

    def backward(self) -> None:
        self.grads = torch.autograd.grad(self.out, self._leaves, self.grad, allow_unused=True)

    def warm_up(self, weights: dict[str, nn.Parameter]) -> int:
        """Run once to initialise kernels and libraries. Returns the bytes that are kept for the backward pass."""
        before = _allocated(self.embedded)
        self.weights = weights
        self.forward()
        kept = _allocated(self.embedded) - before
        if self.learns:
            self.grad = torch.zeros_like(self.out, requires_grad=False)
            self.backward()
        self.out, self.grads, self._leaves = self.embedded, (), []
        return kept

    def record(self, recorder: Recorder, pool: Any, stream: Any) -> None:
        self.forwards = recorder(self.forward, pool, stream)
        self.backwards = recorder(self.backward, pool, stream) if self.learns else None
        self.out = self.out.detach()


class ReplayPass(torch.autograd.Function):
    """Hidden states of a recorded pass, in tensors that the next replay overwrites."""

    @staticmethod
    def forward(ctx: Any, graphs: PassGraphs, recorded: RecordedPass, embedded_T: Tensor, *weights: Tensor) -> Tensor:
        recorded.forwards.replay()
        graphs.turn += 1
        ctx.graphs, ctx.recorded, ctx.turn, ctx.count = graphs, recorded, graphs.turn, embedded_T.shape[0]
        return recorded.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        recorded: RecordedPass = ctx.recorded
        if ctx.graphs.turn != ctx.turn:
            raise RuntimeError(
                "a recorded pass was replayed before its backward pass: run backward after each pass, or set the "
                "model's `graphs` to None"
            )
        recorded.grad.copy_(grad)
        assert recorded.backwards is not None
        recorded.backwards.replay()
        ctx.graphs.turn += 1  # its memory has been overwritten
        first, *others = recorded.grads
        assert first is not None
        return None, None, first[: ctx.count], *(None if found is None else found.clone() for found in others)


class PassGraphs:
    """The recorded passes of a model whose weights keep their addresses. Not thread-safe."""

    def __init__(self, model: LanguageModel, recorder: Recorder = record) -> None:
        self._backbone, self._embed, self._recorder = model.backbone, model.module.get_input_embeddings(), recorder
        self._name, self._device = model.name, model.device
        self._count = sum(parameter.numel() for parameter in self._backbone.parameters())
        on_gpu = self._device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None
        self._stream: Any = own_stream(self._device) if on_gpu else None
        self._passes: dict[tuple[PassSize, bool], RecordedPass | None] = {}  # None: it does not fit
        self._seen: Counter[tuple[PassSize, bool]] = Counter()
        self._places: tuple[tuple[int, bool], ...] = ()
        self._held = 0  # bytes of gradients
        self._fails = False  # whether a recording of this model has failed
        self.turn = 0  # replays so far

    @classmethod
    def of(cls, model: LanguageModel) -> PassGraphs | None:
        """Call once per model, before other threads run. None: the model gains nothing or cannot be recorded."""
        if model.device.type != "cuda" or not _recordable(model):
            return None
        graphs = cls(model)
        try:
            with torch.no_grad(), torch.cuda.device(model.device):
                return graphs if graphs._is_right(model) else None
        except Unknown:
            return None
        except torch.OutOfMemoryError:
            raise
        except FOREIGN:  # its layers are not called with rows of embeddings
            return None

    def _is_right(self, model: LanguageModel) -> bool:
        count = sum(LENGTHS)
        ids_T = torch.linspace(1, model.size - 1, count, device=self._device).long()
        layout = Packed.of(list(LENGTHS), self._device)
        usual, embedded = model.hidden(ids_T, layout), self._embed(ids_T)
        padded = RecordedPass(self._run, PassSize.of(layout.lengths), embedded, learns=False)
        padded.fill(embedded, layout)
        padded.forward()
        found = padded.out[:count]
        close = float((found - usual).float().norm()) <= CLOSE * float(usual.float().norm())
        return close and not waits_for_the_device(padded.forward)

    def hidden(self, ids_T: Tensor, layout: Packed) -> Tensor | None:
        """(at least T, D), valid until the next pass. None: this size is not recorded."""
        size = PassSize.of(layout.lengths)
        if self._count * size.tokens > MOST_WORK or torch.is_autocast_enabled(self._device.type):
            return None
        self._forget_if_moved()
        learns = torch.is_grad_enabled() and any(learning for _, learning in self._places)
        self._seen[size, learns] += 1
        if not self._is_open(size, learns):
            return None
        embedded_T = self._embed(ids_T)
        recorded = self._recorded(size, learns, embedded_T, layout)
        if recorded is None:
            return None
        recorded.fill(embedded_T, layout)
        found: Tensor = ReplayPass.apply(self, recorded, embedded_T, *recorded.weights.values())
        return found

    def _forget_if_moved(self) -> None:
        """Drop all graphs if weights have other addresses or other weights train: graphs depend on both."""
        places = tuple((weight.data_ptr(), weight.requires_grad) for weight in self._backbone.parameters())
        if places != self._places:
            self._passes.clear()
            self._seen.clear()
            self._places, self._held = places, 0

    def _is_open(self, size: PassSize, learns: bool) -> bool:
        """Whether this size is recorded or should be now."""
        key = size, learns
        new = self._seen[key] > 1 and len(self._passes) < KEPT and not self._fails
        return self._passes[key] is not None if key in self._passes else new

    def _recorded(self, size: PassSize, learns: bool, embedded_T: Tensor, layout: Packed) -> RecordedPass | None:
        key = size, learns
        if key not in self._passes:
            recorded = RecordedPass(self._run, size, embedded_T, learns)
            recorded.fill(embedded_T, layout)
            self._passes[key] = recorded if self._record(recorded) else None
        return self._passes[key]

    def _record(self, recorded: RecordedPass) -> bool:
        weights = self._backbone.named_parameters() if recorded.learns else ()
        learning = {
            name: weight for name, weight in weights if weight.requires_grad and weight is not self._embed.weight
        }
        held = self._held + sum(weight.nbytes for weight in learning.values())
        try:
            kept = on_stream(self._stream, lambda: recorded.warm_up(learning))
        except torch.OutOfMemoryError:
            return False
        if not _has_room(kept + held, self._device):
            log.info("%s: no room to record a pass of %s tokens", self._name, recorded.size.tokens)
            return False
        try:
            with on_device(self._device):
                recorded.record(self._recorder, self._pool, self._stream)
        except RuntimeError as error:  # from torch, CUDA or Triton; the same pass has just worked unrecorded
            log.warning("%s: its passes cannot be recorded, and run slower (%s)", self._name, first_line(error))
            self._fails = True
            return False
        self._held = held
        return True

    def _run(self, embedded: Tensor, layout: FixedLayout, leaves: Mapping[str, Tensor]) -> Tensor:
        given = {"inputs_embeds": embedded[None], "position_ids": layout.positions[None], "layout": layout}
        out = functional_call(self._backbone, dict(leaves), kwargs={**given, "use_cache": False})
        hidden: Tensor = out.last_hidden_state.squeeze(0)
        return hidden


def _recordable(model: LanguageModel) -> bool:
    """The checks that need no pass."""
    module, route = model.module, model.route
    packed = isinstance(route, PackedRoute) and route.limit is None and takes_our_attention(model)
    fixed = rotary_limit(module.config, "dynamic") is None and not why_stock(model.device)
    plain = model.stays and not any(is_traceable_wrapper_subclass(weight) for weight in module.parameters())
    embeddings = sum(isinstance(child, nn.Embedding) for child in module.modules())
    recomputed = any("forward" in vars(layer) for layer in decoder_layers(module))
    random = any(isinstance(child, nn.Dropout) and child.p and child.training for child in module.modules())
    return (
        packed
        and fixed
        and plain
        and embeddings == 1
        and not recomputed
        and not random
        and model.dtype in attention.HALF
    )


def _allocated(tensor: Tensor) -> int:
    return torch.cuda.memory_allocated(tensor.device) if tensor.is_cuda else 0


def _has_room(needed: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return needed <= ROOM * share * total and 2 * needed <= free
