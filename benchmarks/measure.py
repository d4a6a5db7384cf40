"""What the benchmarks share: interleaved times, peak memory, the machine, and how results are written."""

import datetime
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from src.tables import markdown


def interleaved(cases: dict[str, Callable[[], Any]], device: str, rounds: int, seconds: float) -> dict[str, float]:
    """The median time of each case in seconds, all of them run in turn, A B … A B …, so that a noisy machine hits all alike.

    Each case runs once to warm up, then in `rounds` rounds, or 3 if the rounds so far took more than `seconds`.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    begin = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - begin > seconds:
            break
        for name, run in cases.items():
            times[name].append(_one(run, device))
    return {name: statistics.median(values) for name, values in times.items()}


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


def peak_memory(
    make: Callable[..., Callable[[], Any]], warm_up: tuple, arguments: list[tuple], device: str
) -> list[int]:
    """The most bytes in use while `make(*a)()` runs, inputs included, for each `a`, from the smallest to the largest.

    `make(*warm_up)()` runs first, so that what libraries keep for themselves does not count.

    On a GPU by its allocator. On a CPU by the operating system, in a process of its own, since only a process's highest
    mark can be read.
    """
    if device == "cpu":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_peaks_on_cpu, (make, warm_up, arguments, torch.get_num_threads()))
    make(*warm_up)()
    peaks = []
    for a in arguments:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        make(*a)()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return peaks


def _peaks_on_cpu(
    make: Callable[..., Callable[[], Any]], warm_up: tuple, arguments: list[tuple], threads: int
) -> list[int]:
    torch.set_num_threads(threads)
    make(*warm_up)()
    before = _highest_mark()
    peaks = []
    for a in arguments:
        make(*a)()
        peaks.append(_highest_mark() - before)
    return peaks


def _highest_mark() -> int:
    """The most bytes that this process has had in memory."""
    try:  # what getrusage says on Linux includes the process that started this one
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Rates(NamedTuple):
    """What a device was seen to do: bytes moved a second, and operations of a matrix product a second."""

    bytes: float
    operations: float

    def floor(self, bytes: float, operations: float) -> float:
        """Seconds below which this much cannot be done."""
        return max(bytes / self.bytes, operations / self.operations)


def rates(device: str, dtype: torch.dtype) -> Rates:
    """Measure a large copy and a large matrix product."""
    size, side = (2**30, 8192) if device == "cuda" else (2**26, 1024)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    product = torch.empty_like(matrix)
    cases = {"copy": lambda: target.copy_(source), "product": lambda: torch.mm(matrix, matrix, out=product)}
    times = interleaved(cases, device, rounds=9, seconds=20)
    return Rates(2 * size / times["copy"], 2 * side**3 / times["product"])


def machine(device: str) -> dict[str, Any]:
    """What a number needs beside it: processor or card, threads, versions and the day."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def write(
    out: Path, name: str, title: str, facts: dict[str, Any], tables: list[list[list[str]]], rows: list[dict[str, Any]]
) -> None:
    """Write name.md, with the tables one below the other, and name.json below `out`, and show the tables."""
    out.mkdir(parents=True, exist_ok=True)
    caption = f"{title} {', '.join(f'{key} {value}' for key, value in facts.items())}."
    text = "\n\n".join([caption, *map(markdown, tables)])
    (out / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")
    (out / f"{name}.json").write_text(json.dumps({"title": title, "machine": facts, "rows": rows}, indent=1) + "\n")
    print(f"\n{text}\n\ntable    {out / name}.md\nnumbers  {out / name}.json")
