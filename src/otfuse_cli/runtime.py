"""Device, threads, seed, dtype and stopwatch: the only global state, set in one place.

Nothing of ours but `errors` may be imported here; torch is imported inside the functions, so that
`--help` stays fast.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .errors import UsageError

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")

# malloc.h: parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
# Arrays from this size on are mapped; free memory at the end of the heap that is kept.
_MAPPED_BYTES, _SPARE_BYTES = 2 << 20, 16 << 20
# Free memory at the end of the heap that is kept while networks run.
_KEPT_BYTES = 256 << 20

# New objects before they are searched for garbage, and searches of younger before older ones.
_COLLECTED_AFTER = 20_000, 20, 20


class Progress(Protocol):
    """What a long piece of work reports to: a stage, and how far it is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Say that `done` of `total` steps of `stage` are finished."""


def silent(stage: str, done: int, total: int) -> None:
    """A `Progress` that says nothing."""


class Workers(Protocol):
    """Who runs pieces of work that don't depend on one another.

    Whoever they are, a piece is the same arithmetic, and results come in the order of the items:
    sums of them have the same bits.

    Attributes:
        away: Whether pieces leave this process: then work, items and results are sent.
    """

    away: bool

    @property
    def remarks(self) -> tuple[str, ...]:
        """What readers of results should know of who worked on them."""

    def share(self, value: Any, *, lasting: bool = False) -> Any:
        """What stands for a value as work, or inside items that are tuples: it is sent once.

        `lasting`: items will hold it for as long as the work that takes them goes on.
        """

    def each(
        self, work: Any, items: Iterable[Any], *, memory: Callable[[Any], int] | None = None
    ) -> Iterator[Any]:
        """What `work` makes of every item, in order.

        Args:
            work: A function of an item alone, or what `share` gave for one.
            items: Taken as there is somebody to work on them.
            memory: Bytes that one takes beside the program; None for few.

        Raises:
            OtfuseError: Of the first item that has one.
        """

    def stages(
        self, work: Any, items: Iterable[Any], *, memory: Callable[[Any], int] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """The same for work that makes two things: a result, and what another item will hold.

        That one stays where it was made, and something stands for it as for what is shared.
        """


class Here:
    """This process: one item after another, when it is asked for."""

    away = False
    remarks = ()

    def share(self, value: Any, *, lasting: bool = False) -> Any:
        """The value."""
        return value

    def each(
        self, work: Any, items: Iterable[Any], *, memory: Callable[[Any], int] | None = None
    ) -> Iterator[Any]:
        """See `Workers`."""
        return map(work, items)

    stages = each


@dataclass(frozen=True)
class Runtime:
    """Where and how numerics run: a torch device string, a seed, a progress sink, workers."""

    device: str = "cpu"
    seed: int = 0
    progress: Progress = silent
    workers: Workers = field(default_factory=Here)

    def inner(self) -> Runtime:
        """That of a piece of work; in another process it says nothing, and has no workers."""
        return Runtime(self.device, self.seed) if self.workers.away else self

    def generator(self, salt: int = 0) -> torch.Generator:
        """A fresh CPU generator; equal seeds and salts give equal streams."""
        import torch

        return torch.Generator().manual_seed(self.seed * 1_000_003 + salt)


@contextmanager
def without_collection() -> Iterator[None]:
    """No search for garbage inside: for work that makes many small objects and keeps them.

    Each search walks through all objects there are, torch's too: a fifth of the time that a graph
    of twenty thousand tensors takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def resolve_device(name: str) -> str:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device that exists.

    Raises:
        UsageError: The name is unknown, or CUDA is asked for and absent.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return name
    index = name.removeprefix("cuda").removeprefix(":")
    if name.startswith("cuda") and (not index or index.isdigit()):
        if not torch.cuda.is_available():
            raise UsageError(
                "no CUDA device",
                where=f"--device {name}",
                why="this torch sees no GPU",
                fix="use --device cpu, or install a CUDA build of torch",
            )
        if index and int(index) >= torch.cuda.device_count():
            raise UsageError(
                "no such CUDA device",
                where=f"--device {name}",
                why=f"this machine has {torch.cuda.device_count()} CUDA device(s)",
                fix="use a smaller index",
            )
        return name
    raise UsageError("unknown device", where=f"--device {name}", fix="use auto, cpu or cuda")


def collect_rarely() -> None:
    """Look for garbage less often, in programs of ours: what is imported is none.

    At Python's own threshold, a sixth of what starting takes goes into looking through it.
    """
    gc.set_threshold(*_COLLECTED_AFTER)


def wait_asleep() -> None:
    """Let threads that wait for one another sleep, in programs of ours.

    OpenMP's spin for milliseconds after each piece of work, at the cost of the thread that they
    wait for where cores are shared: twice the CPU time, and the wall time too. Read when torch is
    loaded; what the user has set stays.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def full_precision() -> Iterator[None]:
    """Networks run on a GPU in all digits of float32, by the same algorithms each time.

    By itself cuDNN takes TF32, which has three digits, whatever products of matrices are set to.
    Afterwards everything is as it was. Whoever has set precisions operator by operator keeps them.
    """
    from torch.backends import cudnn

    try:
        before = cudnn.allow_tf32, cudnn.deterministic
    except RuntimeError:  # torch 2.9 and newer has a switch for each operator instead
        yield
        return
    try:
        cudnn.allow_tf32, cudnn.deterministic = False, True
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


def return_freed_memory() -> None:
    """Let the C library map large arrays one by one, so that what is freed leaves the process.

    glibc raises its limit for that up to 32 MiB as arrays are freed; those below then lie on a heap
    that keeps its holes: 150 MiB and more of them after a few layers of a transformer. For the
    process as a whole, so for programs of ours only. Elsewhere nothing happens.
    """
    # Setting one of the two fixes the other, too: at 128 KiB, were it not set.
    _set_malloc({_M_MMAP_THRESHOLD: _MAPPED_BYTES, _M_TRIM_THRESHOLD: _SPARE_BYTES})
    _memory.ours = True


def reuse_freed_memory() -> None:
    """Let what is freed be there for the next array, in programs that `return_freed_memory`.

    For running networks, where arrays of the same few sizes come and go: the pages of each, mapped
    and cleared anew, were a fifth of the time of a fit.
    """
    if _memory.ours:
        _set_malloc({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _KEPT_BYTES})


@dataclass
class _Memory:
    """Whose the process is, and so how its memory is held."""

    ours: bool = False


_memory = _Memory()


def _set_malloc(parameters: Mapping[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for parameter, value in parameters.items():
            libc.mallopt(parameter, value)


@dataclass
class _Threads:
    """How many threads the user allows; None for as many as there are processors."""

    most: int | None = None


_threads = _Threads()


def use_threads(most: int) -> None:
    """Take no more than so many threads, in programs of ours: for arithmetic and for reading."""
    if "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(most)  # read when the libraries are loaded
    import torch

    torch.set_num_threads(most)
    _threads.most = most


def work_for_others(threads: int) -> None:
    """Make this process a worker's: as many threads as its master computes with, memory as ours.

    Torch may be loaded already; what it splits work into decides the last bits of sums.
    """
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    _threads.most = threads
    if not _memory.ours:
        collect_rarely()
        return_freed_memory()


def cores() -> int:
    """Processors this process may use: not those the machine has, nor more than were allowed."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    return found if _threads.most is None else min(found, _threads.most)


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The items, each next one made in a thread while the one before is being used."""
    end: Any = object()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, items, end)
            yield item


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes.

    Linux keeps `ru_maxrss` over exec: a child of a large process would report its parent's peak.
    `VmHWM` (proc_pid_status(5)) is of the program that runs now.
    """
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return _peak_working_set()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_working_set() -> int:
    """The same on Windows (psapi.h: PROCESS_MEMORY_COUNTERS); 0 where nothing tells it."""
    import ctypes
    from ctypes import wintypes

    sizes = (
        *("PeakWorkingSetSize", "WorkingSetSize", "QuotaPeakPagedPoolUsage", "QuotaPagedPoolUsage"),
        *("QuotaPeakNonPagedPoolUsage", "QuotaNonPagedPoolUsage", "PagefileUsage"),
        "PeakPagefileUsage",
    )

    class Counters(ctypes.Structure):
        _fields_ = (
            ("cb", ctypes.c_uint32),
            ("PageFaultCount", ctypes.c_uint32),
            *((name, ctypes.c_size_t) for name in sizes),
        )

    load = getattr(ctypes, "WinDLL", None)
    if load is None:
        return 0
    kernel = load("kernel32")
    kernel.GetCurrentProcess.restype = wintypes.HANDLE
    kernel.K32GetProcessMemoryInfo.argtypes = (
        wintypes.HANDLE,
        ctypes.POINTER(Counters),
        ctypes.c_uint32,
    )
    counters = Counters(cb=ctypes.sizeof(Counters))
    kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb)
    return int(counters.PeakWorkingSetSize)


@dataclass
class Stopwatch:
    """Wall seconds by stage, for the report's `timings`."""

    seconds: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a block under the name of its stage."""
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self.clock() - start
