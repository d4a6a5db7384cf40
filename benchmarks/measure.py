"""What the benchmarks share: interleaved times, peak memory, the machine, and writing of results."""

import contextlib
import ctypes
import datetime
import importlib.metadata
import json
import math
import multiprocessing
import platform
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from src.errors import UserError, first_line
from src.files import check_writable, write_json
from src.lion.cpu import linear
from src.tables import markdown

RESULTS = Path("benchmarks/results")
# Tokens of the run before those whose peak memory is measured: on a CPU few, since what it needed does not count any
# more; on a GPU as many as need the kernels of longer texts.
WARM_UP_TOKENS = {"cpu": 16, "cuda": 128}
OUT = f"(default: this machine's folder in {RESULTS})"
# What the processes of `apart` import, once.
SLOW_IMPORTS = ["torch", "transformers.modeling_utils", "transformers.models.auto.image_processing_auto"]


def attempt(failed: dict[Any, str] | None, name: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), or None if it fails, with the reason in failed[name]; without `failed`, raise."""
    try:
        return function(*arguments)
    except Exception as error:
        if failed is None:
            raise
        failed[name] = first_line(error)
        with contextlib.suppress(Exception):  # CUDA's state may be broken
            torch.cuda.empty_cache()  # if the GPU's memory was too small
        return None


def interleaved(
    cases: dict[Any, Callable[[], Any]],
    device: str,
    rounds: int,
    seconds: float,
    failed: dict[Any, str] | None = None,
    least: int = 3,
    warm_ups: int = 1,
    after: Callable[[], Any] = lambda: None,
) -> dict[Any, float]:
    """Return the median time of each case in seconds. They run in turn, A B A B …, so that noise affects all alike.

    Each case runs `warm_ups` times, then in `rounds` rounds; after the first `least`, no new round starts once
    `seconds` have passed. `after` is called after each run. A case that fails is omitted, see
    `attempt`.
    """
    times: dict[Any, list[float]] = {name: [] for name in cases}

    def run(name: Any) -> bool:
        taken = attempt(failed, name, _one, cases[name], device)
        after()
        if taken is not None:
            times[name].append(taken)
        return taken is not None

    running = [name for name in cases if all(run(name) for _ in range(warm_ups))]
    times = {name: [] for name in running}  # without the warm-up
    begin = time.perf_counter()
    for number in range(rounds):
        if number >= least and time.perf_counter() - begin > seconds:
            break
        running = [name for name in running if run(name)]
    return {name: statistics.median(times[name]) for name in running}


def device_time(run: Callable[[], Any], about: float, rounds: int = 5) -> float | None:
    """Return the median seconds of the GPU's work in `run`, without the gaps in which it waits for the program.

    Replays a CUDA graph of enough runs, each of roughly `about` seconds, to make the graph's launch negligible. A run
    of more than 50 ms is replayed twice: there the gaps are negligible, and rounds costly. Returns None if `run` cannot be captured as a graph, and in every later call: a failed capture can break the next.
    """
    global _can_capture
    if not _can_capture:
        return None
    runs = min(max(1, math.ceil(0.005 / about)), 50)
    try:
        return _replay_seconds(run, runs, rounds) if about < 0.05 else _replay_seconds(run, 1, 2, warm_ups=1)
    except Exception as error:
        _can_capture = False
        print(f"no more times on the device alone, since a CUDA graph failed: {first_line(error)}", file=sys.stderr)
        return None


def graph_time(make: Callable[..., Callable[[], Any]], *arguments: Any, rounds: int = 9) -> float:
    """Return the median seconds of `make(*arguments)()` as a CUDA graph. Captures it in a process of its own, since a
    failed capture can break the next."""
    return apart(_make_and_replay, make, arguments, rounds)


def _make_and_replay(make: Callable[..., Callable[[], Any]], arguments: tuple, rounds: int) -> float:
    return _replay_seconds(make(*arguments), 1, rounds)


def _replay_seconds(run: Callable[[], Any], runs: int, rounds: int, warm_ups: int = 3) -> float:
    """Return the median seconds of a run in a CUDA graph of several. Raises the error of one that cannot be captured."""
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):  # what the first runs allocate and compile does not belong in a graph
            run()
    before.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(runs):
                run()
    except Exception as error:
        torch.cuda.set_stream(before)  # a failed capture does not restore it
        raise error.__context__ or error from None  # the end of the capture fails too, and says less
    graph.replay()
    return statistics.median(_one(graph.replay, "cuda") for _ in range(rounds)) / runs


_can_capture = True


def _one(run: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


class Cost(NamedTuple):
    """Of a single run: its peak memory in bytes and its time in seconds."""

    bytes: int
    seconds: float


def peak_memory(
    make: Callable[..., Callable[[], Any]], warm_up: tuple, arguments: list[tuple], device: str
) -> list[int]:
    """Return the peak memory of `make(*a)()` in bytes, see `single_runs`."""
    return [cost.bytes for cost in single_runs(make, warm_up, arguments, device)]


def single_runs(
    make: Callable[..., Callable[[], Any]], warm_up: tuple, arguments: list[tuple], device: str
) -> list[Cost]:
    """Return the peak memory of `make(*a)()`, with its inputs, and its time without `make`, for each `a`, given from
    smallest to largest. `make(*warm_up)()` runs first, so that buffers of libraries, and what `make` keeps, do not
    count.

    On a GPU the allocator reports memory. On a CPU the operating system reports the peak of a process, so a new one is
    started.
    """
    if device == "cpu":
        return apart(_single_runs_on_cpu, make, warm_up, arguments, torch.get_num_threads())
    costs = []
    for a in arguments:
        make(*warm_up)()  # each time: `make` may keep something for the last length
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        run = make(*a)
        torch.cuda.reset_peak_memory_stats()  # building a model does not count
        seconds = _one(run, device)
        costs.append(Cost(torch.cuda.max_memory_allocated() - before, seconds))
        del run
    return costs


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments), computed in a process of its own."""
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(SLOW_IMPORTS)
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


def _single_runs_on_cpu(make: Callable, warm_up: tuple, arguments: list[tuple], threads: int) -> list[Cost]:
    torch.set_num_threads(threads)
    make(*warm_up)()
    before = highest_mark()
    costs = []
    for a in arguments:
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)  # freed memory that no longer run can use would count
        seconds = _one(make(*a), "cpu")
        costs.append(Cost(max(highest_mark() - before, 0), seconds))  # Linux counts some pages late
    return costs


def highest_mark() -> int:
    """Return the peak memory of this process in bytes."""
    try:  # getrusage on Linux includes the process that started this one
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Rates(NamedTuple):
    """Measured speed of a device: bytes copied per second, and operations of a matrix product per second."""

    bytes: float
    operations: float

    def floor(self, bytes: float, operations: float) -> float:
        """Return the minimum time in seconds for this many bytes and operations."""
        return max(bytes / self.bytes, operations / self.operations)


def rates(device: str, dtype: torch.dtype) -> Rates:
    """Measure a large copy and a large matrix product, by torch.mm or the encoder's linear layer if that is faster."""
    size, side = (2**30, 8192) if device == "cuda" else (2**26, 1024)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matrix = torch.randn(side, side, device=device).to(dtype)  # constant entries would use less power and be faster
    product = torch.empty_like(matrix)
    tokens = torch.randn(4 * side, side, device=device).to(dtype)
    layer = torch.nn.Linear(side, side, bias=False, device=device, dtype=dtype).requires_grad_(False)
    cases = {
        "copy": lambda: target.copy_(source),
        "product": lambda: torch.mm(matrix, matrix, out=product),
        "layer": lambda: linear(layer, tokens),
    }
    times = interleaved(cases, device, rounds=9, seconds=5)
    return Rates(2 * size / times["copy"], 2 * side**3 / min(times["product"], times["layer"] / 4))


def machine(device: str) -> dict[str, Any]:
    """Describe the machine: processor or GPU, threads, versions and the date."""
    of_gpu = {"CUDA": torch.version.cuda, "triton": _version("triton")} if device == "cuda" else {}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **of_gpu,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }


def device_name(device: str) -> str:
    """Return the name of the GPU, or of the processor with the number of threads."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {torch.get_num_threads()} threads"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name. Virtual machines call every EPYC the same: then the generation follows, which tells
    how much it computes per cycle."""
    lines = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", _cpuinfo(), re.MULTILINE))
    name = lines.get("model name", platform.processor() or platform.machine()).strip()
    if name != "AMD EPYC":
        return name
    generations = {"25": "Zen 4" if "avx512f" in lines.get("flags", "") else "Zen 3", "26": "Zen 5"}
    return ", ".join([name, *filter(None, [generations.get(lines.get("cpu family"))])])


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def keep_options(out: Path, options: Any, names: tuple[str, ...]) -> None:
    """Keep in a folder the options that its runs depend on. Raises UserError if they were others, whose runs would be
    continued, or if the folder cannot be written."""
    check_writable("--out", out)
    given, path = json.loads(json.dumps({name: getattr(options, name) for name in names})), out / "options.json"
    kept = json.loads(path.read_text()) if path.is_file() else given
    if changed := [name for name in names if kept.get(name) != given[name]]:
        was = ", ".join(f"{name}={kept.get(name)}" for name in changed)
        raise UserError(f"--out: {out} has runs with {was}; repeat that, or choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, given)


def results_folder(device: str) -> Path:
    """This machine's folder of results, named after its GPU or processor: results/nvidia-h200, results/intel-xeon."""
    name = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else processor()
    words = re.sub(r"\(\w+\)|\b(Processor|CPU)\b|@.*", " ", name)
    if device == "cpu" and "amx_tile" in _cpuinfo():  # with the same name, but much faster in bfloat16
        words += " amx"
    return RESULTS / "-".join(re.findall(r"[a-z0-9]+", words.lower()))


def write(
    out: Path, name: str, title: str, facts: dict, tables: list[list[list[str]]], rows: list[dict], show: bool = True
) -> None:
    """Write the tables to name.md and the rows to name.json in `out`, and print the tables and the failed rows."""
    out.mkdir(parents=True, exist_ok=True)
    caption = f"{title} {', '.join(f'{key} {value}' for key, value in facts.items())}."
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.get("error"):
            case = " ".join(str(x) for key, x in row.items() if key != "error" and isinstance(x, str | int))
            failed.setdefault(row["error"], []).append(case)
    failures = [f"failed: {'; '.join(names)}: {error}" for error, names in failed.items()]
    text = "\n\n".join([caption, *map(markdown, tables), *failures])
    (out / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")
    (out / f"{name}.json").write_text(json.dumps({"title": title, "machine": facts, "rows": rows}, indent=1) + "\n")
    if show:
        print(f"\n{text}\n\ntable    {out / name}.md\nnumbers  {out / name}.json")
