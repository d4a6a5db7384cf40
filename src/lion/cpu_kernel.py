"""Linear attention on a CPU, and the bits of its dropout, as C that the machine's own compiler translates once, in
one to four seconds.

    y_i = Σ_{j<i} s (q_i·k_j) exp(query_i − key_j) v_j  +  δ_i v_i

The chunkwise form with chunks of 32 tokens: in PyTorch each of its steps writes a tensor and reads it again, here a
chunk stays in the first cache from its inputs to its outputs. Reversed views give the other triangle, and three calls
with the operands exchanged the gradients, so there is one loop to get right. The full form takes 32 queries at a time
with all keys. Parallel over texts and heads; a forward pass with few of them also over parts of heads.

Without OpenMP, or with neither a C compiler nor a kernel compiled earlier, PyTorch computes the same numbers;
`LION_NATIVE=0` has it do so for comparison.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import machine
from .channel_kernel_source import CHANNELS
from .cpu_kernel_source import SOURCE as TRIANGLES
from .full_kernel_source import FULL

log = logging.getLogger(__name__)
USE_NATIVE = os.environ.get("LION_NATIVE", "1") != "0"
FLAGS = "-O3 -std=gnu11 -march=native -fno-math-errno -fno-strict-aliasing -fopenmp -fPIC".split()
FLAGS += ["-mprefer-vector-width=512"] * (platform.machine() in ("x86_64", "AMD64"))
SOURCE = TRIANGLES + FULL + CHANNELS
SPAN = 64  # as in cpu_kernel_source.py
STRICT, OWN, GIVEN = range(3)  # the diagonal: none, q_i·k_i, or δ


# The structures of the C sources, in words of 8 bytes. Packed at once, since ctypes' own take several times as
# long as it takes to compute a short text.
_NOTHING = (0,) * 5  # a view: its address, strides of batch, head and token, and whether it is bfloat16
_PROBLEM = struct.Struct("=11q d q 45q q")
_FULL_PROBLEM = struct.Struct("=12q 4d 2q 95q")
_SUMS_PROBLEM = struct.Struct("=5q d 16q")
_CHANNELS_PROBLEM = struct.Struct("=9q 2d 60q")
_OF_NUMBERS, _OF_ROWS = (torch.float64, torch.float32), (torch.float32, torch.bfloat16)  # what a view may be of


def _view(x: Tensor | None, direction: int = 1, number: int | None = None) -> tuple[int, ...]:
    """x: (B or 1, H or 1, L, ·), (B or 1, H or 1, L), or (H,) for all tokens. From the last token to the first if
    direction is −1. number: which one of each row the kernel gets, instead of all."""
    if x is None:
        return _NOTHING
    dtype, shape, strides = x.dtype, x.shape, x.stride()
    numbers = number is not None or len(shape) < 4
    if dtype not in (_OF_NUMBERS if numbers else _OF_ROWS) or not x.is_cpu:
        raise TypeError(f"q, k and v must be of one dtype and on one device (got {dtype} on {x.device})")
    if len(shape) == 1:
        return x.data_ptr(), 0, strides[0], 0, False
    assert numbers or strides[3] == 1 or shape[3] == 1
    token, size = strides[2], x.element_size()
    first = 0 if direction > 0 else (shape[2] - 1) * token
    first += 0 if number is None else number * strides[3]
    batch, head = strides[0] if shape[0] > 1 else 0, strides[1] if shape[1] > 1 else 0
    return x.data_ptr() + first * size, batch, head, direction * token, dtype == torch.bfloat16


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def covers(v: Tensor) -> bool:
    """Whether the kernel is to compute with values v, (B, H, L, E), and queries and keys of the same kind."""
    if torch.compiler.is_compiling() or not v.is_cpu or type(v) not in (Tensor, nn.Parameter):
        return False  # not within a compiler, nor of a tensor without memory of its own
    return v.dtype in (torch.float32, torch.bfloat16) and v.numel() > 0 and is_available()


class FullCall:
    """Both triangles with the same q and k, or one, as a matrix, with dropout.

    q, k: (B, 1 or H, L, D) and v: (B, H, L, E), in float32 or bfloat16; query_sums, key_sums: (B or 1, H or 1, L, T) in
    float64, or None for no decay; or query_sums are log decays in float32, (H,) or (B, H, L), raised to `lowest`;
    diagonal: δ, (B, H, L), or None for s q_i·k_i; directions: 1 or −1 for each triangle; kept: (B, H, L, L) in
    bytes, 1 for the entries that dropout keeps, which are multiplied by factor; or None. order: as for `signed_sums`,
    with log decays of O·H heads; the weights are then the mean of those in each order. epsilon: unless it is 0, each
    row of the matrix is divided by its sum + epsilon."""

    def __init__(
        self, q, k, v, query_sums, key_sums, diagonal, kept, order, factor: float, scale: float, directions,
        epsilon: float, lowest: float,
    ):  # fmt: skip
        self.shape, self.directions = (*v.shape[:3], q.shape[-1], v.shape[-1]), directions
        self.rows = [adjacent_rows(x) for x in (q, k, v)]
        self.sums = query_sums, key_sums
        self.given = None if diagonal is None else diagonal.float()
        self.kept = None if kept is None else kept.contiguous()
        self.order, self.options = order, (lowest, scale, factor, epsilon)
        self.decays = 0 if query_sums is None or query_sums.ndim == 4 else 1 if query_sums.ndim == 3 else 2
        self.divides = epsilon > 0

    def forward(self, y: Tensor, row_sums: Tensor | None = None) -> None:
        """Write to y, (B, H, L, E), and, if rows are divided, to row_sums, (B, H, L), both in float32."""
        B, H, L = self.shape[:3]
        blocks, threads = -(-L // 32), torch.get_num_threads()
        # Each part loads all keys and values, and transposes the keys.
        parts = _parts(B, H, range(1, min(blocks, threads) + 1), lambda parts: 32 * -(-blocks // parts) + 16)
        self._run(y=y, row_sums=row_sums, parts=parts)

    def backward(self, grad: Tensor, of_q, of_k, of_v, with_sums: bool, y=None, row_sums=None) -> list[Tensor | None]:
        """Write the gradients of q, k and v, (B, H, L, ·) in float32; return those of query_sums and key_sums,
        (B, H, L, T) in float64, or of the log decays, with_sums and if given, and of the diagonal, (B, H, L). y,
        row_sums: the results of `forward`, if rows are divided."""
        B, how = self.shape[0], {"dtype": torch.float64, "device": "cpu"}
        of_sums = [None, None]
        if with_sums and self.decays:
            log_decay = self.sums[0]
            of_sums[0] = torch.empty_like(log_decay) if self.decays == 1 else torch.empty(B, len(log_decay), 1, **how)
        elif with_sums:
            shape = *self.shape[:3], len(self.directions)
            of_sums = [None if x is None else torch.empty(shape, **how) for x in self.sums]
        of_given = None if self.given is None else grad.new_empty(self.shape[:3], dtype=torch.float32)
        grads = {"of_q": of_q, "of_k": of_k, "of_v": of_v, "of_sums": of_sums, "of_given": of_given}
        self._run(grad=adjacent_rows(grad), y=None if y is None else adjacent_rows(y), row_sums=row_sums, **grads)
        if self.decays == 2 and with_sums:
            of_sums[0] = of_sums[0].sum((0, 2)).float()
        return [*of_sums, of_given]

    def _run(
        self, *, y=None, row_sums=None, grad=None, of_q=None, of_k=None, of_v=None, of_sums=(None, None), of_given=None,
        parts: int = 1,
    ) -> None:  # fmt: skip
        kind, threads = OWN if self.given is None else GIVEN, _threads(*self.shape[:2], parts)
        query_sums, key_sums = self.sums
        sums = self._by_side(query_sums, query_sums if key_sums is None else key_sums)
        others = map(_view, (y, row_sums, grad, of_q, of_k, of_v))
        views = *map(_view, self.rows), *sums, _view(self.given), *others, *self._by_side(*of_sums), _view(of_given)
        problem = _FULL_PROBLEM.pack(
            *self.shape, 1 in self.directions, -1 in self.directions, kind, threads, parts, _orders(self.order),
            self.decays, *self.options, _address(self.kept), _address(self.order), *chain.from_iterable(views),
        )  # fmt: skip
        if _library().lion_full(problem, 1):
            raise MemoryError("no memory for the matrices of attention; use shorter inputs or fewer threads")

    def _by_side(self, of_queries: Tensor | None, of_keys: Tensor | None) -> list[tuple[int, ...]]:
        """Views of those of queries and keys of the past, then of the future."""
        views = [_NOTHING] * 4
        if self.decays:
            views[0] = _view(of_queries)
            return views
        for number, direction in enumerate(self.directions):
            place = 0 if direction > 0 else 2
            views[place : place + 2] = _view(of_queries, number=number), _view(of_keys, number=number)
        return views


class TriangleCalls:
    """One triangle of a problem, and what its calls share. `forward` and `backward` queue calls; `run` executes them.

    q, k: (B, 1 or H, L, D) and v: (B, H, L, E), in float32 or bfloat16, as of `adjacent_rows`; query_sum, key_sum: (B
    or 1, H or 1, L) in float64; direction: 1 for keys before a query, −1 for keys after it; diagonal: δ, (B, H, L),
    or OWN for s q_i·k_i, or STRICT for 0; order: (L,) integers, the token at each place, or None."""

    def __init__(
        self, q, k, v, query_sum, key_sum, direction: int, scale: float, diagonal: Tensor | int,
        order: Tensor | None = None,
    ):  # fmt: skip
        self.q, self.k, self.v, self.sums, self.direction = q, k, v, (query_sum, key_sum), direction
        self.scale, self.diagonal, self.order = scale, diagonal, order
        self.mirrored_sums = None
        self.calls: list[bytes] = []
        self.tensors: list[Tensor | None] = []  # whose addresses the calls hold

    @staticmethod
    def run(triangles: "list[TriangleCalls]") -> None:
        """Execute the calls of triangles of the same shapes, in their order, all of them for one head after the other:
        in a long text, they then find what they share in the cache."""
        calls = [call for triangle in triangles for call in triangle.calls]
        if _library().lion_triangle(b"".join(calls), len(calls)):
            raise MemoryError("no memory for the states of linear attention; use shorter inputs or fewer threads")
        for triangle in triangles:
            triangle.calls, triangle.tensors = [], []

    def forward(self, y: Tensor, add: bool) -> None:
        """Write to y, (B, H, L, E) in float32, or add to it, the formula at the top of this file."""
        (B, H, _, E), D = y.shape, self.q.shape[-1]

        def columns(parts: int) -> int:
            return -(-E // (16 * parts)) * 16

        def cost(parts: int) -> int:
            """Operations per query: on average 24 scores, each with an exponential that takes as long as 64 products,
            and the state, written and read."""
            return 24 * (D + 64 + columns(parts)) + 2 * D * columns(parts)

        possible = (parts for parts in range(1, -(-E // 16) + 1) if (parts - 1) * columns(parts) < E)
        self._queue(self.q, self.k, self.v, y, add, parts=_parts(B, H, possible, cost))

    def backward(self, grad: Tensor, grad_q, grad_k, grad_v, add: tuple[bool, bool], with_sums: bool) -> None:
        """Write to the gradients, (B, H, L, ·) in float32, those of this triangle, or add to them if `add` (of q
        and k, and of v). Each is such a product too; for k and v, the transposed triangle swaps queries and keys.
        with_sums: whether `of_sums` will be needed."""
        q, k, v = self.q, self.k, self.v
        self._queue(k, q, grad, grad_v, add[1], mirrored=True)
        self.diagonal = STRICT if isinstance(self.diagonal, Tensor) else self.diagonal
        flows = None
        if with_sums:
            flows = torch.empty(*v.shape[:2], -(-v.shape[2] // SPAN) - 1, dtype=torch.float64, device="cpu")
        of_query = self._queue(grad, v, k, grad_q, add[0], other=q, flows=flows)
        of_key = self._queue(v, grad, q, grad_k, add[0], other=k, flows=flows, mirrored=True)
        self.results = of_query, of_key, flows

    def of_sums(self) -> list[Tensor]:
        """The gradients of both sums, (B, H, L) in float64, after `backward` has run."""
        of_query, of_key, flows = self.results
        L, spans = of_query.shape[2], flows.shape[2] + 1
        # An entry adds to its row's sum what it subtracts from its column's, but both are rounded, and through the
        # cumulative sum of the decays the remainders of all tokens add up. What flows across a boundary, by all entries
        # with their key on one side and their query on the other, says what those of a span amount to.
        flows = F.pad(flows * self.scale, (1, 1))
        remainders = of_query - of_key
        remainders = remainders if self.order is None else remainders[..., self.order]
        remainders = remainders if self.direction > 0 else remainders.flip(-1)
        remainders = F.pad(remainders, (0, spans * SPAN - L)).unflatten(-1, (spans, SPAN)).sum(-1) + flows.diff()
        first = torch.arange(spans, device="cpu") * SPAN
        first = first if self.direction > 0 else L - 1 - first
        of_query[..., first if self.order is None else self.order[first]] -= remainders
        return [of_query, -of_key]

    def _queue(self, q, k, v, y, add: bool, *, other=None, flows=None, mirrored: bool = False, parts: int = 1):
        """Queue a call. With flows, return where it will write the products of `other` and its result."""
        (B, H, L, E), direction, sums = y.shape, self.direction, self.sums
        if mirrored:
            self.mirrored_sums = self.mirrored_sums or [-x for x in reversed(sums)]
            direction, sums = -direction, self.mirrored_sums
        given = self.diagonal.float() if isinstance(self.diagonal, Tensor) else None
        dots = None if flows is None else y.new_empty(B, H, L, dtype=torch.float64)
        tensors = q, k, v, *sums, given, y, None if flows is None else other, dots
        kind, threads = self.diagonal if given is None else GIVEN, _threads(B, H, parts)
        towards = direction if self.order is None else 1
        call = _PROBLEM.pack(
            B, H, L, q.shape[-1], E, kind, add, threads, mirrored, parts, direction < 0, self.scale,
            _address(self.order), *chain.from_iterable(_view(x, towards) for x in tensors), _address(flows),
        )  # fmt: skip
        self.calls.append(call)
        self.tensors += tensors
        return dots


class ChannelCalls:
    """A recurrence with a decay per channel: Σ_{j<i} s (Σ_d q_id k_jd λ_jd ⋯ λ_{i-1,d}) v_j, and s (q_i·k_i) v_i if
    inclusive. From the last token to the first if direction is −1.

    q, k: (B, H, L, D) and v: (B, H, L, E), in float32 or bfloat16; log_decay: (B or 1, H, L, D) in float32, raised to
    at least `lowest`; state: that which the first token reads, (B, H, D, E) in float32, or None for zeros."""

    def __init__(self, q, k, v, log_decay, state, direction: int, inclusive: bool, scale: float, lowest: float):
        self.shape, self.direction, self.inclusive = (*v.shape[:3], q.shape[-1], v.shape[-1]), direction, inclusive
        self.operands = [adjacent_rows(x) for x in (q, k, v, log_decay)]
        self.state, self.options = None if state is None else adjacent_rows(state), (scale, lowest)

    def forward(self, y: Tensor, add: bool) -> None:
        """Write to y, (B, H, L, E) in float32, or add to it."""
        self._run("channels", [y], add=add)

    def backward(self, grad: Tensor, of_q, of_k, of_v, of_decay, of_state, add: bool, add_decay: bool) -> None:
        """Write to the gradients, in float32 and shaped as the tensors, or add to those of q, k and v.
        of_decay, (B, H, L, D), may be the same for all tokens of a head, and then receives their sum. Those of the
        decays and of the state may be None."""
        grads = [None, adjacent_rows(grad), of_q, of_k, of_v, of_decay]
        self._run("channels_gradient", grads, of_state, add, add_decay)

    def _run(self, name: str, tensors: list[Tensor | None], of_state=None, add: bool = False, add_decay: bool = False):
        tensors = [*tensors, *[None] * (6 - len(tensors))]
        views = [*(_view(x, self.direction) for x in self.operands), _view(self.state)]
        views += [*(_view(x, self.direction) for x in tensors), _view(of_state)]
        problem = _CHANNELS_PROBLEM.pack(
            *self.shape, self.inclusive, add, add_decay, _threads(*self.shape[:2]), *self.options,
            *chain.from_iterable(views),
        )  # fmt: skip
        if getattr(_library(), f"lion_{name}")(problem, 1):
            raise MemoryError("no memory for the states of linear attention; use shorter inputs or fewer threads")


def signed_sums(log_decay: Tensor, length: int, lowest: float, order: Tensor | None = None) -> Tensor:
    """Sums of log_decay, (H,) or (B, H, L) in float32, each at least `lowest`: before each token, and the negative of
    that up to it, (B or 1, H, L, 2) in float64. order: (O, L) integers, the token at each place of O orders; log_decay
    is then of O·H heads, first those of the first order, and the sums are along each order, (B or 1, H, L, 2·O)."""
    B, H = log_decay.shape[:2] if log_decay.ndim == 3 else (1, len(log_decay))
    count = max(_orders(order), 1)
    sums = torch.empty(B, H // count, length, 2 * count, dtype=torch.float64, device="cpu")
    _library().lion_sums(_sums_problem(log_decay, sums, lowest, order))
    return sums


def signed_sums_gradient(grad: Tensor, log_decay: Tensor, lowest: float, order: Tensor | None = None) -> Tensor:
    """The gradient of log_decay from that of its sums."""
    of_decay, grad = torch.empty_like(log_decay), grad.contiguous()
    _library().lion_sums_gradient(_sums_problem(log_decay, grad, lowest, order, of_decay))
    return of_decay


def _sums_problem(log_decay: Tensor, sums: Tensor, lowest: float, order, of_decay: Tensor | None = None) -> bytes:
    B, H, L, numbers = sums.shape
    threads = 1 if B * H * L < 2**15 else min(torch.get_num_threads(), B * H * numbers // 2)
    views = *_view(log_decay), *_view(sums, number=0), *_view(of_decay)
    return _SUMS_PROBLEM.pack(B, H, L, threads, numbers // 2, lowest, _address(order), *views)


def check_orders(order: Tensor) -> None:
    """Raise ValueError unless each of the orders, (O, L) and contiguous, has every token once: the kernel would write
    anywhere."""
    if not _library().lion_are_orders(_address(order), *order.shape):
        raise ValueError(f"each of the orders must have every token from 0 to {order.shape[1] - 1} once")


def _orders(order: Tensor | None) -> int:
    return 0 if order is None else len(order)


def draw_kept(size: int, dropped: int, seed: int) -> Tensor:
    """`size` bytes, each 1 with probability 1 − dropped / 2^16, or else 0."""
    count = -(-size // 4)
    kept = np.empty(4 * count, dtype=np.uint8)  # within a transform of torch.func, a tensor would show no memory
    threads = min(torch.get_num_threads(), 1 + count // 2**14)
    _library().lion_keep(kept.ctypes.data, count, seed % 2**64, dropped, threads)
    return torch.from_numpy(kept)[:size]


def _threads(B: int, H: int, parts: int = 1) -> int:
    return min(torch.get_num_threads(), B * H * parts)


def _parts(B: int, H: int, possible: Iterable[int], cost: Callable[[int], int]) -> int:
    """How many parts to cut each head into in a forward pass, so that no thread idles. cost(n): the time of one of n
    parts, with the work that each repeats. Parts do not change results."""
    threads = torch.get_num_threads()
    if threads == 1 or B * H >= 4 * threads:  # cutting could save a fifth at most
        return 1

    def time(parts: int) -> float:
        turns = -(-B * H * parts // threads)
        return turns * cost(parts) * (1.08 if parts > 1 else 1)  # smaller gains did not show in measurements

    return min(possible, key=time)


def adjacent_rows(x: Tensor) -> Tensor:
    """x with adjacent numbers in each row, as the kernels need them."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def empty_rows(x: Tensor) -> Tensor:
    """Memory for a result in float32 in the order of x, or in its own if rows of x are not adjacent."""
    like = torch.empty_like(x, dtype=torch.float32)
    return like if like.stride(-1) == 1 else like.new_empty(x.shape)


def is_available() -> bool:
    return USE_NATIVE and machine.adopted("native", True) and _library() is not None


def version() -> str:
    """Tells kernels apart: by source, processor and compiler."""
    return Path(_library()._name).stem.removeprefix("linear-attention-")


def reason() -> str:
    """Why there is no kernel, in parentheses; nothing if there is."""
    if not USE_NATIVE:
        return " (LION_NATIVE=0)"
    return "" if _library() is not None else f" ({_failure})"


_failure = ""


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Load the kernel, compiled if this machine has not compiled it yet; None if it cannot."""
    global _failure
    try:
        library = ctypes.CDLL(str(_compile()))
        library.lion_are_orders.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        for name in ("triangle", "full", "channels", "channels_gradient"):
            getattr(library, f"lion_{name}").argtypes = [ctypes.c_char_p, ctypes.c_int64]
        for name in ("sums", "sums_gradient"):
            getattr(library, f"lion_{name}").argtypes = [ctypes.c_char_p]
        library.lion_keep.argtypes = [
            ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint16, ctypes.c_int
        ]  # fmt: skip
        return library
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines() or [repr(error)]
        _failure = next((line for line in lines if "error" in line), lines[0])
        if isinstance(error, OSError) and error.filename:
            _failure += "; set XDG_CACHE_HOME to a folder that can be written"
        if re.search("failed to map segment.*not permitted", _failure):
            _failure += "; set XDG_CACHE_HOME to a folder whose programs may be executed"
        log.warning("linear attention on this CPU is computed in PyTorch, which is slower: %s", _failure)
        return None


def _compile() -> Path:
    """Return the compiled kernel in the user's cache. Its name tells sources, processors and compilers apart, since
    machines that share a home directory may differ in what they can do. Without a compiler, one that another built."""
    openmp = _loaded_openmp()
    compiler = (os.environ.get("CC") or "cc").split()
    options = {"check": True, "capture_output": True, "text": True, "timeout": 120}
    folder = machine.private_folder()
    kernel = f"linear-attention-{_digest(SOURCE, *FLAGS, machine.digest(), openmp)}"
    try:
        version = subprocess.run([*compiler, "--version"], **options).stdout
    except OSError as error:
        if built := sorted(filter(_is_intact, folder.glob(f"{kernel}-*.so"))):
            return built[0]
        raise RuntimeError(f"there is no C compiler {compiler[0]}; install one, or set CC to one") from error
    path = folder / f"{kernel}-{_digest(*compiler, version)}.so"
    if not _is_intact(path):
        with machine.alone():
            if not _is_intact(path):  # no other process has built it meanwhile
                _build(path, compiler, openmp, options)
    return path


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(path: Path, compiler: list[str], openmp: str, options: dict) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:  # another process never loads half
        source, built = Path(temporary, "kernel.c"), Path(temporary, "kernel.so")
        source.write_text(SOURCE)
        # The runtime that torch uses, by its path: a second one would start threads of its own.
        subprocess.run([*compiler, *FLAGS, "-c", str(source), "-o", f"{source}.o"], **options)
        subprocess.run([*compiler, "-shared", f"{source}.o", openmp, "-lm", "-o", str(built)], **options)
        checksum = hashlib.sha256(built.read_bytes()).digest()
        with built.open("ab") as file:  # loading ignores what follows the library
            file.write(checksum)
            file.flush()
            os.fsync(file.fileno())
        built.replace(path)


def _is_intact(path: Path) -> bool:
    """Whether a file ends with the checksum of what precedes it. Loading a damaged library would end the process."""
    content = path.read_bytes() if path.exists() else b""
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def _loaded_openmp() -> str:
    """The OpenMP runtime that torch has loaded; other packages may have brought others."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError as error:
        raise RuntimeError("the kernel needs Linux, where /proc/self/maps lists libraries") from error
    found = sorted(set(re.findall(r"/.*/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*$", maps, re.MULTILINE)))
    of_torch = [path for path in found if Path(path).is_relative_to(Path(torch.__file__).parent)]
    if not found:
        raise RuntimeError("torch uses no OpenMP runtime that the kernel could share")
    return (of_torch or found)[0]
