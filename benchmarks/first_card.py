"""The first ten minutes on a GPU: are the kernels right, are they fast, and which tiles suit the card?

    python benchmarks/first_card.py [--out first-card] [--steps card correctness sweep] [--device cpu]

Runs these steps, each in a process of its own and with a time limit, and writes everything into one folder:

    card          versions, memory and matrix rates
    compile       the kernels of the next steps, on all processor cores
    correctness   every form in bfloat16 with heads of 64 against PyTorch in float64, in memory filled with NaN, and
                  whether 20 runs give the same bits
    operator      benchmarks/operator.py at four lengths
    train         benchmarks/train_step.py with 128 and 16 texts
    profile       which operations take the GPU's time in a step of LION-S and of Hydra
    sweep         the fastest tiles of each kernel, printed as the table in src/lion/linear_attention_triton.py
    ptxas         the same numbers as compiled by another assembler, such as the CUDA toolkit's
    sanitizer     one call of each form under compute-sanitizer, if installed
    tests         the tests of the kernels
    compiled      LION-S's step on texts of three lengths in turn, with and without torch.compile; takes minutes, so
                  only if named in --steps

A step that fails or takes too long leaves what it has found, and the next one starts. Ends with a summary that names
what failed, and with exit status 1 if anything did. Needs torch, triton, transformers and matplotlib; Composer is not
used. On a CPU the steps run in small, the kernels in Triton's interpreter.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if "cpu" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import itertools
import json
import multiprocessing
import multiprocessing.pool
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import measure
from benchmarks.kernels import TOOLS, replaced
from src import cli
from src.errors import UserError, first_line
from src.files import write_atomically
from src.lion import linear_attention
from src.lion import linear_attention_triton as host
from src.lion.hydra_attention import Scans, hydra_attention
from src.lion.linear_attention import attention_matrix
from src.lion.patch_orders import linear_attention_in_orders
from src.tables import markdown

BFLOAT16 = {"y": 5e-3, "dq": 5.5e-3, "dk": 5.5e-3, "dv": 5.5e-3, "per token": 3e-3, "per head": 2e-2}
HYDRA = 8e-3  # of the sum of two scans, which are rounded too
REPEATS = 20
PR_SET_PDEATHSIG = 1
# Rows and columns, warps, stages. The rows of all products must divide the longest.
CANDIDATES = [
    (rows, columns, warps, stages)
    for rows, columns, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (2, 3, 4))
    if rows * columns <= 128 * 64 and not (rows == 64 and warps == 8)
]


class Step(NamedTuple):
    """What is run, for how many seconds at most."""

    run: Callable[["Report", argparse.Namespace], None]
    seconds: int


class Report:
    """The checks of one step, written after each, so that nothing is lost when the step is cut off."""

    def __init__(self, path: Path):
        self.path, self.checks = path, []

    def check(self, what: str, value: str, passed: bool | None = True) -> None:
        """Note one result; passed: None if there is nothing to pass."""
        self.checks.append({"what": what, "value": value, "passed": passed})
        write_atomically(self.path, json.dumps(self.checks, indent=1))
        print(described(self.checks[-1]), flush=True)


def described(check: dict) -> str:
    words = {None: "", True: "ok      ", False: "FAILED  "}
    return f"{words[check['passed']]}{check['what']}: {check['value']}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(default: cuda)")
    parser.add_argument("--out", type=Path, default=Path("first-card"), help="(default: first-card)")
    usual = [name for name in STEPS if name != "compiled"]
    parser.add_argument("--minutes", type=float, default=10, help="limit for all steps together (default: 10)")
    parser.add_argument("--steps", nargs="+", default=usual, choices=STEPS, help="(default: all but compiled)")
    a = parser.parse_args(argv)
    if not host.kernels.AVAILABLE:
        raise UserError("Triton is not installed; install it to run the kernels")
    if a.device == "cuda" and not has_gpu():
        raise UserError("no GPU is available; use --device cpu to run the steps in small in Triton's interpreter")
    a.small = a.device == "cpu"
    a.out.mkdir(parents=True, exist_ok=True)
    begin, rows = time.monotonic(), []
    for name in a.steps:
        started = time.monotonic()
        seconds = min(STEPS[name].seconds, begin + 60 * a.minutes - started)
        if seconds <= 0:
            rows.append([name, "-", "-", f"not run, since the {a.minutes:g} minutes are over"])
            continue
        print(f"\n== {name}, at most {seconds:.0f} s (log: {a.out / name}.log)", flush=True)
        ended = in_own_process(name, seconds, a)
        path = a.out / f"{name}.json"
        checks = json.loads(path.read_text()) if path.is_file() else []
        failed = [check["what"] for check in checks if check["passed"] is False]
        if ended:
            failed.append(ended)
        passed = sum(check["passed"] is True for check in checks)
        print(
            *(described(check) for check in checks if check["passed"] is not True), f"{passed} checks passed", sep="\n"
        )
        rows.append([name, f"{time.monotonic() - started:.0f} s", str(passed), "; ".join(failed) or "-"])
        write_atomically(a.out / "summary.md", f"{table_of(rows)}\n")
    table = table_of(rows)
    write_atomically(a.out / "summary.md", f"{table}\n")
    print(f"\n{table}\n\n{time.monotonic() - begin:.0f} s; everything is in {a.out}")
    if any(row[-1] != "-" for row in rows):
        sys.exit(1)


def table_of(rows: list[list[str]]) -> str:
    return markdown([["step", "time", "checks passed", "failed"], *rows])


def has_gpu() -> bool:
    """Look for a GPU in a process of its own: where torch has looked for one, no forked process may use it."""
    process = multiprocessing.get_context("fork").Process(target=lambda: os._exit(not torch.cuda.is_available()))
    process.start()
    process.join()
    return process.exitcode == 0


def in_own_process(name: str, seconds: float, a: argparse.Namespace) -> str | None:
    """Run one step, with what it prints in a log. Return why it did not end well, or None."""
    (a.out / f"{name}.json").unlink(missing_ok=True)
    log = a.out / f"{name}.log"
    process = multiprocessing.get_context("fork").Process(target=child, args=(name, a, log))
    process.start()
    process.join(seconds)
    late = process.is_alive()
    if late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
        process.join()
    text = log.read_text(errors="replace") if log.is_file() else ""
    if late:
        return f"{name}: stopped after {seconds:.0f} s"
    return f"{name}: {text.strip().splitlines()[-1] if text.strip() else 'ended'}" if process.exitcode else None


def child(name: str, a: argparse.Namespace, log: Path) -> None:
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):  # on Linux, end with the command, or the GPU would stay busy
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.stdout = sys.stderr = file = log.open("w", buffering=1)
    for stream in (1, 2):  # of the programs that it starts
        os.dup2(file.fileno(), stream)
    STEPS[name].run(Report(a.out / f"{name}.json"), a)


# The steps


def card(report: Report, a: argparse.Namespace) -> None:
    facts = measure.machine(a.device)
    for name, value in facts.items():
        report.check(name, str(value), None)
    if a.device == "cuda":
        report.check("compute capability", ".".join(map(str, torch.cuda.get_device_capability())), None)
        report.check("driver", said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), None)
    for path in filter(None, (str(TOOLS / "ptxas"), other_ptxas())):
        report.check(path, said(path, "--version").splitlines()[-1], None)
    rates = measure.rates(a.device, torch.float32 if a.small else torch.bfloat16)
    report.check("copy", f"{rates.bytes / 1e12:.2f} TB/s", None)
    report.check("matrix product", f"{rates.operations / 1e12:.1f} TFLOP/s", None)


def said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or "-"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"- ({first_line(error)})"


def compile_kernels(report: Report, a: argparse.Namespace) -> None:
    """Fill Triton's cache. Alone, a process would take minutes."""
    if a.small:
        report.check("skipped", "needs a GPU", None)
        return
    jobs = [("correctness", (*case, *SHAPE, a.device)) for case in checked(LENGTHS)]
    forms = itertools.product(("full", "chunkwise"), ("lion-lit", "lion-d", "lion-s", "hydra"), OPERATOR_LENGTHS)
    jobs += [("operator", (*case, True, 1, 12, 64, "bfloat16", 128, a.device)) for case in forms]
    jobs += [("train", (name,)) for name in TRAINED]
    with spawned() as pool:
        failed = [error for error in pool.imap_unordered(run_once, jobs) if error]
    report.check("kernels compiled", f"{len(jobs) - len(failed)} of {len(jobs)} cases", None)
    for error in failed:
        report.check("failed", error, None)


def spawned() -> multiprocessing.pool.Pool:
    return multiprocessing.get_context("spawn").Pool(max(1, min(14, (os.cpu_count() or 2) - 1)))


def run_once(job: tuple[str, tuple]) -> str | None:
    """Run a case that a later step measures; return why it failed, or None."""
    from benchmarks import operator as benchmark
    from benchmarks import train_step

    kind, arguments = job
    makers = {
        "correctness": lambda *case: prepare(*case)[0],
        "operator": benchmark.prepare,
        "train": lambda name: train_step.prepare(name, train_step.parse(["--layers", "2", "--batch", "16"])),
    }
    failed: dict[str, str] = {}
    measure.attempt(failed, job, lambda: makers[kind](*arguments)())
    return f"{kind} {arguments}: {failed[job]}" if failed else None


LENGTHS, SHAPE = (1, 7, 64, 65, 300, 1000), (3, 12)  # tokens; texts and heads
OPERATOR_LENGTHS = (128, 512, 4096, 16384)
TRAINED = ("softmax", "lion-lit", "lion-s", "hydra")


def checked(lengths: tuple[int, ...]) -> Iterator[tuple[str, str, str, int]]:
    """Yield form, decay, case and tokens of what `correctness` checks."""
    for form, decay, case, length in itertools.product(*CASES, lengths):
        if case in ("dropout", "causal", "separate", "orders", "hydra") and length not in (64, 300, 20):
            continue
        if (form, case) == ("chunkwise", "dropout") or (decay, case) in (("none", "separate"), ("none", "orders")):
            continue
        if case == "hydra" and decay != "token":
            continue
        if case == "normalized" and length == 1:  # all but nothing is left of the gradients
            continue
        yield form, decay, case, length


def correctness(report: Report, a: argparse.Namespace) -> None:
    lengths, batch, heads = ((20,), 1, 1) if a.small else (LENGTHS, *SHAPE)
    kept = {}
    for form, decay, case, length in checked(lengths):
        name = f"{form}, {DECAYS[decay]}, {case}, {length} tokens"
        run, exact = prepare(form, decay, case, length, batch, heads, a.device)
        with poisoned():
            actual = run()
        for kind, x, y in zip(("y", "dq", "dk", "dv", DECAYS[decay]), actual, exact()):
            error = float((x.double() - y).norm() / y.norm().clamp(min=1e-12)) if y.norm() > 1e-9 else float(x.norm())
            limit = BFLOAT16[kind] * (4 if a.small else 1)  # the interpreter truncates to bfloat16
            limit *= 3 if length == 1 else 1  # a single product may cancel
            limit *= 2 if case in ("normalized", "orders") else 1  # gradients cancel along rows
            limit = max(limit, HYDRA) if case == "hydra" else limit
            report.check(f"{name}: {kind}", f"{error:.1e}", bool(error <= limit))
        if length == (20 if a.small else 300):
            again = (run() for _ in range(2 if a.small else REPEATS))
            same = all(torch.equal(x, y) for one in again for x, y in zip(one, actual))
            report.check(f"{name}: the same bits", str(same), same)
            kept[name] = [x.cpu() for x in actual]
            torch.save(kept, a.out / "outputs.pt")


DECAYS = {"none": "no decay", "head": "per head", "token": "per token"}
CASES = (
    ("full", "chunkwise"),
    DECAYS,
    ("plain", "mask", "packed", "dropout", "normalized", "causal", "separate", "orders", "hydra"),
)


def prepare(form: str, decay: str, case: str, length: int, batch: int, heads: int, device: str) -> tuple:
    """Return a function for the output and the gradients of one case by the kernels in bfloat16, and one for those of
    PyTorch in float64."""
    generator = torch.Generator(device).manual_seed(length)
    shape, size = (batch, heads, length), 16 if device == "cpu" else 64

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    operands = [normal(*shape, size).bfloat16() for _ in range(3)]
    grad = normal(*shape, size).bfloat16()
    if decay != "none":
        operands.append(-torch.nn.functional.softplus(normal(*(shape if decay == "token" else (heads,)))))
    options = {"form": form, "chunk_size": 16 if device == "cpu" else 128}
    what = {}
    if case in ("normalized", "orders"):
        operands[:2] = [x.abs() + 0.1 for x in operands[:2]]
    if case == "normalized":
        what["normalize"] = True
    if case == "mask":
        what["mask"] = torch.rand(batch, length, generator=generator, device=device) > 0.2
    elif case == "packed":
        what["seq_idx"] = (torch.arange(length, device=device) // 48).expand(batch, -1)
    elif case == "causal":
        what["causal"] = True
    dropout_p = 0.1 if case == "dropout" else 0.0

    def attend(*x, dropout_p: float = 0.0, **how) -> torch.Tensor:
        if case == "hydra":
            return hydra(*x, **how)
        if case == "separate":
            how["log_decay_future"] = x[3] / 2
        if case == "orders":  # from left to right and from right to left
            tokens, dim = torch.arange(length, device=device), 0 if x[3].ndim == 1 else 1
            orders, decays = torch.stack([tokens, tokens.flip(0)]), torch.cat([x[3], x[3] / 2], dim)
            return linear_attention_in_orders(*x[:3], decays, orders, **how)
        return linear_attention(*x, **what, **how, dropout_p=dropout_p)

    def gradients(function: Callable, dtype: torch.dtype | None) -> list[torch.Tensor]:
        leaves = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in operands]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]

    def fused(*x) -> torch.Tensor:
        torch.manual_seed(length)
        return attend(*x, **options, dropout_p=dropout_p)

    def exact(*x) -> torch.Tensor:
        if dropout_p == 0:
            return attend(*x, form="full")
        return (attention_matrix(*x[:2], *x[3:], **what) * kept_entries()) @ x[2]

    def kept_entries() -> torch.Tensor:
        ones, columns = torch.ones(*shape, 1, device=device), []
        for unit in torch.eye(length, device=device).split(64, dim=1):
            torch.manual_seed(length)
            columns.append(
                linear_attention(ones, ones, unit.expand(*shape[:2], -1, -1), scale=1.0, **options, dropout_p=dropout_p)
            )
        return torch.cat(columns, -1).double()

    return lambda: gradients(fused, None), lambda: gradients(exact, torch.float64)


def hydra(q, k, v, log_decay, **how) -> torch.Tensor:
    """Compute Hydra's attention, in which the future's queries are k and its keys q."""
    log_decays = torch.stack([log_decay, log_decay / 2])
    return hydra_attention(v, Scans((q, k), (k, q), log_decays, (-log_decays).log()), -log_decay, **how)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Let torch.empty return NaN, so that what is read before it was written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def other_ptxas() -> str | None:
    """The CUDA toolkit's ptxas, or else the one that Triton brings for newer cards."""
    places = "ptxas", "/usr/local/cuda/bin/ptxas", TOOLS / "ptxas-blackwell"
    return next(filter(None, map(shutil.which, places)), None)


def ptxas(report: Report, a: argparse.Namespace) -> None:
    path, before = other_ptxas(), a.out / "outputs.pt"
    if a.small or path is None or not before.is_file():
        report.check("skipped", "needs a GPU, another ptxas, and what the step `correctness` wrote", None)
        return
    os.environ |= {"TRITON_PTXAS_PATH": path, "TRITON_CACHE_DIR": str((a.out / "cache").resolve())}
    expected = torch.load(before, weights_only=True)
    for form, decay, case in itertools.product(*CASES):
        name = f"{form}, {DECAYS[decay]}, {case}, 300 tokens"
        if name in expected:
            run, _ = prepare(form, decay, case, 300, 3, 12, a.device)
            error = max(
                float((x.cpu().double() - y.double()).norm() / y.double().norm()) for x, y in zip(run(), expected[name])
            )
            report.check(name, f"{error:.1e}", error <= 1e-3)


def tests(report: Report, a: argparse.Namespace) -> None:
    files = ["tests/test_linear_attention_triton.py"]
    if a.small:
        files = [f"{files[0]}::test_the_operands_gpu_decides"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    if not a.small and importlib.util.find_spec("xdist"):
        command += ["-n", str(max(1, (os.cpu_count() or 2) - 2))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    report.check("pytest", done.stdout.strip().splitlines()[-1], done.returncode == 0)
    for line in failed:
        report.check(line.removeprefix("FAILED ").partition(" - ")[0], "failed", False)


def sanitizer(report: Report, a: argparse.Namespace) -> None:
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if a.small or tool is None:
        report.check("skipped", "needs a GPU and compute-sanitizer", None)
        return
    program = "from benchmarks.first_card import prepare\nfor form in ('full', 'chunkwise'):\n"
    program += "    prepare(form, 'token', 'mask', 300, 1, 2, 'cuda')[0]()\n"
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": sys.path[0]}
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    print(done.stdout)
    lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line] or done.stdout.splitlines()[-1:]
    report.check("memcheck", lines[-1].strip("= "), done.returncode == 0)


def operator(report: Report, a: argparse.Namespace) -> None:
    import benchmarks.operator as benchmark

    small = ["--lengths", "8", "--heads", "1", "--head_dim", "8", "--rounds", "1", "--forms", "full", "chunkwise"]
    lengths = ["--lengths", *map(str, OPERATOR_LENGTHS), "--tokens", "65536", "--seconds", "2"]
    benchmark.main(["--device", a.device, "--out", str(a.out), *(small if a.small else lengths)])
    path = next(a.out.glob("operator-*.json"))
    rows = json.loads(path.read_text())["rows"]
    for length, form, least in ((512, "full", 0.9), (4096, "chunkwise", 5)):
        ratios = [
            row["softmax_over_this"]
            for row in rows
            if (row["length"], row["form"], row["variant"]) == (length, form, "lion-s")
        ]
        if ratios and ratios[0]:
            what = f"LION-S, {form}, {length} tokens: softmax's time is"
            report.check(what, f"×{ratios[0]:.2f}", ratios[0] >= least)
    for row in rows:
        if row.get("error"):
            report.check(f"{row['form']} {row['variant']} {row['length']}", row["error"], None)
    report.check("table", str(path.with_suffix(".md")), bool(rows))


SWEPT = ("y", "dq", "dk", "states")
# What the sweep times: form, decay, case, tokens, texts. The first is a layer as it is trained.
TIMED = [
    ("full", "token", "dropout", 128, 128),
    ("full", "token", "mask", 512, 32),
    ("full", "none", "plain", 512, 32),
    ("full", "token", "normalized", 197, 64),
    ("chunkwise", "token", "plain", 4096, 4),
]


def sweep(report: Report, a: argparse.Namespace) -> None:
    candidates = CANDIDATES[:2] if a.small else CANDIDATES
    if not a.small:  # fill Triton's cache
        with spawned() as pool:
            list(pool.imap_unordered(compile_only, candidates))
    times: dict[tuple, dict[str, list[float]]] = {}
    base = None
    for candidate in cli.progress(candidates, desc="tiles"):
        failed: dict[str, str] = {}
        found = measure.attempt(failed, "error", timed_kernels, candidate, a.small)
        if found is None:
            report.check(str(candidate), failed["error"], None)
            continue
        own, outputs = found
        base = base or outputs
        errors = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(outputs, base)]
        times[candidate] = own
        shown = ", ".join(f"{name} {' + '.join(f'{1e6 * x:.1f}' for x in seconds)}" for name, seconds in own.items())
        report.check(f"{candidate}, µs", shown, max(errors) < 2e-2)

    def slowness(candidate: tuple, name: str) -> float:
        """The mean of a kernel's times, each relative to the fastest tiles' in that case."""
        fastest = map(min, zip(*(own[name] for own in times.values())))
        return statistics.mean(x / y for x, y in zip(times[candidate][name], fastest))

    best = {name: min(times, key=functools.partial(slowness, name=name)) for name in SWEPT if times}
    capability = (9, 0) if a.small else torch.cuda.get_device_capability()
    report.check(f"tiles {capability}", f"{best},", None)
    before = host.TILES[max(card for card in host.TILES if card <= capability)]
    for name, candidate in best.items():
        gain = slowness(before[name], name) / slowness(candidate, name) if before[name] in times else None
        report.check(f"fastest {name}", f"{candidate}{'' if gain is None else f', ×{gain:.2f} of the present'}", None)


def compile_only(candidate: tuple) -> None:
    measure.attempt({}, "error", timed_kernels, candidate, False, False)


def timed_kernels(
    candidate: tuple, small: bool, timed: bool = True
) -> tuple[dict[str, list[float]], list[torch.Tensor]]:
    """Return the seconds of each kernel with these tiles, in each case in which it runs, and the outputs and gradients
    of all cases."""
    device, launch = "cpu" if small else "cuda", host.Kernel.launch
    seconds, outputs = {name: [] for name in SWEPT}, []
    cases = [("full", "token", "mask", 16, 1), ("chunkwise", "token", "mask", 80, 1)] if small else TIMED
    host._plan.cache_clear()
    with replaced(host, "TILES", dict.fromkeys(host.TILES, dict.fromkeys(SWEPT, candidate))):
        for form, decay, case, length, batch in cases:
            recorded: dict[str, tuple] = {}

            def record(kernel: host.Kernel, *tensors, recorded=recorded) -> None:
                recorded.setdefault("states" if kernel.name == "grad_states" else kernel.name, (kernel, tensors))
                launch(kernel, *tensors)

            run, _ = prepare(form, decay, case, length, batch, 1 if small else 12, device)
            with replaced(host.Kernel, "launch", record):
                outputs += run()
            for name in SWEPT if timed else ():
                if name in recorded:
                    kernel, tensors = recorded[name]
                    seconds[name].append(time_of(functools.partial(kernel.launch, *tensors), device))
    host._plan.cache_clear()
    return seconds, outputs


def time_of(run: Callable[[], None], device: str) -> float:
    """Return the seconds that the device takes. Raises ValueError if it cannot be measured without the program's."""
    taken = measure.interleaved({0: run}, "cpu", 1, 1)[0] if device == "cpu" else measure.device_time(run, 2e-4)
    if taken is None:
        raise ValueError("no CUDA graph could be captured")
    return taken


def train(report: Report, a: argparse.Namespace) -> None:
    small = ["--layers", "1", "--hidden", "64", "--length", "8", "--rounds", "1", "--precision", "fp32"]
    for batch in (1,) if a.small else (128, 16):
        how = small if a.small else ["--rounds", "9", "--graph"]
        times = step_times(report, a, f"train-{batch}", "--models", *TRAINED, "--batch", str(batch), *how)
        if times.get("lion-s") and times.get("softmax"):
            ratio = times["lion-s"] / times["softmax"]
            passed = ratio <= 1.10 if batch == 128 else None
            report.check(f"LION-S's step, {batch} texts, relative to softmax's", f"×{ratio:.2f}", passed)
        if times.get("hydra") and times.get("softmax"):
            ratio = times["hydra"] / times["softmax"]
            report.check(f"Hydra's step, {batch} texts, relative to softmax's", f"×{ratio:.2f}", None)


def profile(report: Report, a: argparse.Namespace) -> None:
    """Write where the time of a step goes, by operation, to profile-MODEL.txt."""
    from benchmarks import train_step

    small = ["--layers", "1", "--hidden", "64", "--length", "8", "--batch", "1", "--precision", "fp32"]
    how = train_step.parse(["--device", a.device, *(small if a.small else [])])
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [] if a.small else [torch.profiler.ProfilerActivity.CUDA]
    key = f"self_{'cpu' if a.small else 'device'}_time_total"
    for name in ("lion-s", "hydra"):
        step = train_step.prepare(name, how)
        for _ in range(3):
            step()
        with torch.profiler.profile(activities=activities) as profiler:
            step()
        found = profiler.key_averages()
        write_atomically(
            a.out / f"profile-{name}.txt", found.table(sort_by=key, row_limit=40, max_name_column_width=90)
        )
        total = sum(getattr(event, key) for event in found)
        for event in sorted(found, key=lambda event: -getattr(event, key))[:12]:
            own = getattr(event, key)
            report.check(
                f"{name}, {event.key[:70]}", f"{own / 1000:.2f} ms, {own / total:.0%}, {event.count} times", None
            )


def compiled(report: Report, a: argparse.Namespace) -> None:
    if a.small:
        report.check("skipped", "needs a GPU", None)
        return
    how = "--models", "lion-s", "--length", "128", "96", "64", "--rounds", "9"
    for name, *more in (("plain",), ("compiled", "--compile")):
        ms = step_times(report, a, name, *how, *more).get("lion-s")
        if ms:
            report.check(f"LION-S's step on three lengths, {name}", f"{ms:.1f} ms", None)


def step_times(report: Report, a: argparse.Namespace, name: str, *how: str) -> dict[str, float]:
    """Run train_step.py and return the milliseconds of each model's step; a failed one is reported."""
    from benchmarks import train_step

    train_step.main(["--device", a.device, "--out", str(a.out / name), *how])
    rows = json.loads(next((a.out / name).glob("train-step-*.json")).read_text())["rows"]
    for row in rows:
        if row.get("error"):
            report.check(f"{row['model']}, {name}", row["error"], False)
    return {row["model"]: row["ms"] for row in rows if row.get("ms")}


STEPS = {  # what matters most first
    "card": Step(card, 40),
    "compile": Step(compile_kernels, 100),
    "correctness": Step(correctness, 110),
    "operator": Step(operator, 110),
    "train": Step(train, 120),
    "profile": Step(profile, 40),
    "sweep": Step(sweep, 120),
    "ptxas": Step(ptxas, 60),
    "sanitizer": Step(sanitizer, 45),
    "tests": Step(tests, 240),
    "compiled": Step(compiled, 180),
}

if __name__ == "__main__":
    cli.run(main)
