"""Several ranks, started by `torchrun -m opd …` or another launcher that sets RANK, WORLD_SIZE and the address of the first rank.

Weights and gradients travel by NCCL between GPUs and by gloo between CPUs. Everything else is sent as messages through gloo. All
ranks must take part in every exchange; otherwise the others would wait forever.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from opd.common.context import StopRequests
from opd.common.errors import AnotherRank, OpdError, RanksLost, RecipeError, Stopped, UserError
from opd.common.messages import read_message, write_message
from opd.engines.alongside import SharedSampler
from opd.loop.learner import Optimiser, ShardedOptimiser
from opd.loop.ranks import Ranks, reject_numbered
from opd.models.language_model import LanguageModel, Pack
from opd.models.settings import Lora
from opd.models.sharded import SHARD, ShardedModel, files_here, gather_full, load_presharded, load_sharded_frozen
from opd.objective.batch import Batch
from opd.objective.micro import TokenStatistics
from opd.recipe import Stage, Train
from opd.recipe.stage import Cluster
from opd.records import Rollout, Signal, TokenSampler
from opd.teachers.kinds import SPREAD

if TYPE_CHECKING:
    from opd.loop.ranks import Seen


T = TypeVar("T")
PATIENCE = timedelta(hours=1)  # for a silent rank; a rank that has ended is noticed at once
HYBRID = ("replicate", SHARD)
LEAVE = 5.0  # seconds that the first rank to fail waits for the others to notice
_RUNS = count()  # number of runs in this process
FAILED, CODE, LEFT = "failed", "code", "left"  # store keys: failures, first exit code, its readers


class DistributedRanks(Ranks):
    def __init__(self, store: Any, rank: int, size: int, local: int) -> None:
        self._store, self.rank, self.size, self._local = store, rank, size, local
        self._interrupts: StopRequests | None = None
        self._stopping = 0  # the stop signal that all ranks know of
        self._answers = False  # true while the others wait for this rank's samples
        self._held = False  # true until the received data is stored
        self._turn = 0  # exchanges so far, equal on all ranks
        self._batch: dict[str, Rollout] = {}  # the newest batch that was dealt

    @property
    def sharded(self) -> bool:
        return True

    @property
    def title(self) -> str:
        return f" and {self.size} ranks"

    def require(self, spec: Stage) -> None:
        if not spec.train.learn:
            raise RecipeError(
                f"stage {spec.name!r} only scores (train.learn: false), which one process does. Run it without torchrun."
            )
        if spec.rollout.staleness:
            raise RecipeError(
                f"rollout.staleness {spec.rollout.staleness} with several ranks: they sample and train in turns. Set it to 0, or run "
                "in one process."
            )
        if spec.rollout.demonstrations is not None:
            raise RecipeError(
                "rollout.demonstrations with several ranks: one process requests and stores them. Drop them, or run in "
                "one process."
            )
        if spec.keeps_hidden:
            raise RecipeError(
                "store.hidden with several ranks: hidden states stay on the rank that uses them. Set it to false, or run in "
                "one process."
            )
        self._group(spec.cluster)
        for name, kind in spec.teachers.items():
            if kind.is_student_now:
                raise RecipeError(f"teachers.{name}: {SPREAD}")
            for ref in kind.reads():
                reject_numbered(ref.device or "", f"teachers.{name}: ")

    def device(self, asked: torch.device, name: str) -> torch.device:
        if asked.type == "cpu":
            return asked
        reject_numbered(name)
        if self._local >= torch.cuda.device_count():
            raise RecipeError(
                f"rank {self.rank} has no GPU: this machine has {torch.cuda.device_count()}, and ranks {self._local + 1} or more were "
                "started on it. Start fewer (--nproc-per-node), or set device: cpu."
            )
        return torch.device("cuda", self._local)

    # --- Messages ---

    def share(self, make: Callable[[], T]) -> T:
        if self.size == 1:
            return make()
        self._turn += 1
        made = make() if self.leads else None
        message = _bytes([self._turn, made]) if self.leads else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([message.numel()])
        dist.broadcast(length, 0)
        message = message if self.leads else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, 0)
        return made if self.leads else self._opened(message)  # type: ignore[return-value]

    def gather(self, part: T) -> list[T]:
        asked = 0 if self._interrupts is None else self._interrupts.asked
        if self.size == 1:
            self._note_stop(asked)
            return [part]
        self._turn += 1
        message = _bytes([self._turn, [asked, part]])
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([message.numel()]))
        longest = max(map(int, lengths))
        padded = torch.nn.functional.pad(message, (0, longest - message.numel()))
        everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(everyone, padded)
        received = [
            (asked, part) if rank == self.rank else self._opened(everyone[rank][: int(lengths[rank])])
            for rank in range(self.size)
        ]
        self._note_stop(max(stop for stop, _ in received))
        return [other for _, other in received]

    def _opened(self, message: torch.Tensor) -> Any:
        turn, value = read_message(message.numpy().tobytes())
        if turn != self._turn:
            raise RuntimeError(f"ranks are out of step: exchange {turn} came where {self._turn} was expected")
        return value

    def barrier(self) -> None:
        self.gather(None)

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers. Stop requests are not shared here, because this may run between two checks."""
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    # --- Stopping ---

    def listen(self, interrupts: StopRequests) -> Callable[[], None]:
        self._interrupts = interrupts
        return self.poll_stop

    def poll_stop(self) -> None:
        if self._stopping and not self._held and self._interrupts is not None:
            self._interrupts.check()

    @contextmanager
    def holding(self) -> Iterator[None]:
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def stop_check(self, check: Callable[[], None]) -> Callable[[], None]:
        def sooner() -> None:
            check()
            if self._answers and self._interrupts is not None:
                self._interrupts.check()

        return sooner

    @contextmanager
    def answering(self) -> Iterator[None]:
        self._answers = True
        try:
            yield
        finally:
            self._answers = False

    def _note_stop(self, signal: int) -> None:
        if signal and self._interrupts is not None:
            self._stopping = signal
            self._interrupts.obey(signal)

    # --- Work ---

    def opens_sampler(self, leader_only: bool) -> bool:
        return self.leads or not leader_only

    def samples_everywhere(self, leader_only: bool) -> bool:
        return not leader_only

    def deal(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Deal whole groups or pairs, the longest first, each to the rank with the fewest tokens so far."""
        self._batch = {rollout.id: rollout for rollout in rollouts}
        sizes: dict[str, int] = {}
        for rollout in rollouts:
            unit = rollout.unit
            sizes[unit] = sizes.get(unit, 0) + rollout.length
        loads, owner = [0] * self.size, {}
        for unit in sorted(sizes, key=lambda unit: -sizes[unit]):
            rank = min(range(self.size), key=lambda rank: loads[rank])
            owner[unit] = rank
            loads[rank] += sizes[unit]
        return [rollout for rollout in rollouts if owner[rollout.unit] == self.rank]

    def load_student(
        self,
        name: str,
        dtype: str,
        device: str,
        revision: str | None,
        cluster: Cluster,
        gradient_checkpointing: bool,
        lora: Lora | None,
    ) -> LanguageModel | None:
        if not all(self.gather(files_here(name, revision))):
            return None
        return load_presharded(
            name,
            dtype=dtype,
            device=device,
            revision=revision,
            lora=lora,
            gradient_checkpointing=gradient_checkpointing,
            mesh=self._mesh(device, cluster),
            most=self.most,
            leads=self.leads,
        )

    def shard(self, student: LanguageModel, cluster: Cluster) -> LanguageModel:
        if isinstance(student, ShardedModel):
            return student
        return ShardedModel(student, self._mesh(student.device.type, cluster), self.most, self.leads)

    def _mesh(self, device: str, cluster: Cluster) -> DeviceMesh:
        group = self._group(cluster)
        sizes, names = ((self.size,), (SHARD,)) if group == self.size else ((self.size // group, group), HYBRID)
        return init_device_mesh(torch.device(device).type, sizes, mesh_dim_names=names)

    def _group(self, cluster: Cluster) -> int:
        """The number of ranks that share one copy of the trained weights."""
        if cluster.shard == "full":
            return self.size
        group = cluster.group or int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        if self.size % group:
            raise RecipeError(
                f"cluster.shard hybrid: {self.size} ranks do not make groups of {group}. Set cluster.group to a divisor, or "
                "start another number of ranks."
            )
        return group

    def load_sharded_frozen(self, name: str, dtype: str, device: str, revision: str | None) -> LanguageModel:
        mesh = init_device_mesh(torch.device(device).type, (self.size,))
        return load_sharded_frozen(name, dtype=dtype, device=device, revision=revision, mesh=mesh, most=self.most)

    def optimiser(self, student: LanguageModel, train: Train) -> Optimiser:
        return ShardedOptimiser(student.trainable(), train, student.outer())

    def add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum gradients over ranks. Loss weights are normalised over the whole batch, so gradients add up; ranks without one add zeros.

        If no rank has a gradient, none is set, as in one process.
        """
        if not self.most(int(any(parameter.grad is not None for parameter in parameters))):
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            full = gather_full(tensor)
            if self.leads:
                found[name] = full.to("cpu", copy=True)
        return found

    def sampler(self, sampler: TokenSampler | None, leader_only: bool = False) -> TokenSampler:
        return SharedSampler(sampler, self, 1 if leader_only else None)

    # --- Facts about a batch ---

    def exchange(self, signals: Mapping[str, Signal], hidden: bool) -> dict[str, Signal]:
        sent = {name: replace(signal, values=None) if hidden else signal for name, signal in signals.items()}
        everyone = {name: signal for part in self.gather(sent) for name, signal in part.items()}
        return everyone | dict(signals)

    def complete(self, batch: Batch) -> None:
        everyone: list[dict[str, Any]] = self.gather(vars(batch.first_pass))
        for part in everyone:
            _fill(vars(batch.first_pass), part)

    def collect(self, seen: Seen) -> Seen:
        sent = [
            (
                [rollout.id for rollout in pack.rollouts],
                found.loss,
                found.reverse_kl,
                found.entropy,
                found.mismatch,
                found.counts,
                found.traces,
                found.overlap,
                found.kl,
                found.log_ratio,
            )
            for pack, found in seen
        ]
        parts = self.gather(sent)
        return [
            pair
            for rank, part in enumerate(parts)
            for pair in (seen if rank == self.rank else [self._seen(*values) for values in part])
        ]

    def _seen(
        self, ids: list[str], loss: dict[str, float], reverse_kl: np.ndarray, entropy: np.ndarray, mismatch: np.ndarray,
        counts: dict[str, tuple[int, int]], traces: dict[str, dict[str, Any]], overlap: np.ndarray,
        kl: dict[str, np.ndarray], log_ratio: dict[str, np.ndarray],
    ) -> tuple[Pack, TokenStatistics]:  # fmt: skip
        return Pack.of([self._batch[name] for name in ids]), TokenStatistics(
            loss, reverse_kl, entropy, mismatch, counts, traces, overlap=overlap, kl=kl, log_ratio=log_ratio
        )

    # --- Errors ---

    def first_code(self, code: int) -> int | None:
        """The exit code of the first rank to fail; None if this rank is the first and should report the error.

        The store may live in one rank. That rank then waits until the others have read it.
        """
        try:
            if self._store.add(FAILED, 1) > 1:
                found = int(self._store.get(CODE))
                self._store.add(LEFT, 1)
                return found
            self._store.set(CODE, str(code))
            dist.destroy_process_group()  # so that the others notice
            until = time.monotonic() + LEAVE
            while time.monotonic() < until and self._store.add(LEFT, 0) < self.size - 1:
                time.sleep(0.05)
        except dist.DistError:  # the store ended with its rank
            pass
        return None


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(write_message(value)), dtype=torch.uint8)


def _fill(into: dict[Any, Any], part: Mapping[Any, Any]) -> None:
    """Merge nested mappings with arrays by rollout as leaves. Every rank holds the arrays of its own rollouts."""
    for key, value in part.items():
        if isinstance(value, dict):
            _fill(into.setdefault(key, {}), value)
        else:
            into.setdefault(key, value)


@contextmanager
def joined_ranks(make: Callable[[Any, int, int, int], DistributedRanks] = DistributedRanks) -> Iterator[Ranks]:
    """The ranks of a launcher, for the duration of a run. On an error, one rank reports it and all ranks end."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() and local < torch.cuda.device_count()
    if cuda:
        torch.cuda.set_device(local)
    if dist.is_initialized():
        raise UserError(
            "torch.distributed is already in use in this process; opd joins the ranks of a launcher itself."
        )
    shared, rank, size = rendezvous(PATIENCE)
    store = dist.PrefixStore(f"opd/{next(_RUNS)}", shared)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    ranks = make(store, rank, size, local)
    try:
        yield ranks
    except Stopped:
        with suppress(RuntimeError):  # another rank has failed in the meantime
            ranks.barrier()  # the leader's save takes longest, and launchers end all ranks soon after one ends
        dist.destroy_process_group()
        raise
    except Exception as error:  # bugs too: the error is raised here, and the other ranks learn that one rank reports it
        lost = isinstance(error, RuntimeError) and _lost(error)
        code = ranks.first_code(error.exit_code if isinstance(error, OpdError) else OpdError.exit_code)
        if code is not None and (lost or isinstance(error, OpdError)):
            raise AnotherRank(code) from None
        if lost:
            raise RanksLost(
                f"rank {rank} lost its connection to another rank, which ended without an error message: killed, or out of memory? Everything "
                f"durable is kept. Restart all ranks with `opd resume RUN`. ({str(error).splitlines()[0][:200]})"
            ) from None
        raise
    else:
        dist.destroy_process_group()


def _lost(error: RuntimeError) -> bool:
    """Whether an error of torch means that another rank is gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection" in str(error)


# --- Rendezvous: torch's store and gloo's sockets ---
#
# By default they listen on every address of a machine, and neither asks for a token. So they stay on loopback if all ranks are on one machine,
# and otherwise on the network of MASTER_ADDR if that is an IP address. The store of torchrun and NCCL's sockets (NCCL_SOCKET_IFNAME) are not changed.


GET_ADDRESS = 0x8915  # SIOCGIFADDR
INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


def rendezvous(patience: timedelta) -> tuple[Any, int, int]:
    """The store of the launcher's ranks, the number of this rank, and the number of ranks."""
    host, rank, size = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    alone = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    if (found := interface_of(LOOPBACK if alone else host)) is not None:
        os.environ.setdefault(INTERFACE, found)
    if rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not _is_address(host):
        return next(dist.rendezvous("env://", timeout=patience))
    return _store(host, int(os.environ["MASTER_PORT"]), size, patience), rank, size


@cache  # a process may carry out several runs
def _store(host: str, port: int, size: int, patience: timedelta) -> dist.TCPStore:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening: int | None = socket.create_server((host, port), family=family).detach()
    except OSError:  # the address is forwarded to this machine and is not its own: listen on all addresses
        listening = None
    return dist.TCPStore(host, port, size, True, timeout=patience, multi_tenant=True, master_listen_fd=listening)


def interface_of(host: str) -> str | None:
    """The network interface that reaches an address. None for a name, which may resolve differently on each machine."""
    if not _is_address(host) or ":" in host:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        with contextlib.suppress(OSError):  # no route to the host
            one.connect((host, 9))  # sends nothing
        own = one.getsockname()[0]
        loopback = ipaddress.ip_address(own).is_loopback
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                found = socket.inet_ntoa(fcntl.ioctl(one, GET_ADDRESS, struct.pack("256s", name.encode()))[20:24])
                if found == own or (loopback and ipaddress.ip_address(found).is_loopback):
                    return name
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
