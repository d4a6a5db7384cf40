"""What the GPU kernels are compiled to and what launching them costs, without a GPU:

    python benchmarks/kernels.py [--cards 80 90] [--head_dims 64] [--host]

Compiles every kernel to machine code as a forward and a backward pass would launch it, for A100 (80) and H100 (90), and
lists, for each: registers per thread, bytes spilled to memory, shared memory and how many programs a multiprocessor
holds; matrix instructions, on Hopper with the first operand in registers or in shared memory, and those that ptxas
serializes (its warning C7515); and for each loop the instructions that are issued per 64×32 entries of a matrix.
TRITON_PTXAS_PATH selects another ptxas. Writes a table and its numbers.

--host measures instead how long the program takes to launch the kernels of one layer's operator, forward and backward,
with a driver that launches nothing, and how many launches there are.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import contextlib
import itertools
import math
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from src import cli
from src.errors import UserError
from src.lion import linear_attention
from src.lion import linear_attention_triton as host
from src.lion.hydra_attention import Scans, hydra_attention
from src.lion.patch_orders import linear_attention_in_orders

FORMS = {  # and further arguments of `linear_attention`
    "full": {},
    "full, dropout": {"dropout_p": 0.1},
    "full, rows divided": {"normalize": True},
    "full, two orders": {"orders": 2},
    "full, causal": {"causal": True},
    "chunkwise": {},
    "chunkwise, rows divided": {"normalize": True},
    "chunkwise, causal": {"causal": True},
}
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # bytes available to a program
THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048}  # of a multiprocessor, which has 65,536 registers


class Launch(NamedTuple):
    """A kernel and the tensors it would have been launched with."""

    kernel: host.Kernel
    tensors: tuple[torch.Tensor | None, ...]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, nargs="+", default=[80, 90], help="compute capabilities (default: 80 90)")
    parser.add_argument("--head_dims", type=int, nargs="+", default=[32, 64, 128], help="(default: 32 64 128)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    decays = "none", "head", "token", "hydra"
    parser.add_argument("--decays", nargs="+", default=["none", "token", "hydra"], choices=decays)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--host", action="store_true", help="time launches instead")
    parser.add_argument("--out", type=Path, default=measure.RESULTS, help="(default: benchmarks/results)")
    a = parser.parse_args(argv)
    if not host.kernels.AVAILABLE or host.INTERPRETED:
        raise UserError("kernels.py compiles with Triton; install it, and unset TRITON_INTERPRET")
    facts = {"triton": host.triton.__version__, "torch": torch.__version__}
    if a.host:
        time_launches(a.decays, a.out, facts)
        return
    facts["ptxas"] = re.findall(r"release \S+ (\S+)", run_tool(ptxas(), "--version"))[0]
    rows = []
    cases = [
        (card, dtype, size, form, decay)
        for card, dtype, size, form, decay in itertools.product(a.cards, a.dtypes, a.head_dims, a.forms, a.decays)
        if size <= host.LARGEST_HEAD[getattr(torch, dtype)] and exists(form, decay)
    ]
    for card, dtype, size, form, decay in cli.progress(cases, desc="kernels"):
        for launch in launches(form, decay, getattr(torch, dtype), size, size, card=card):
            failed: dict[str, str] = {}
            needs = measure.attempt(failed, "error", compiled, launch, card) or failed
            if needs.get("shared", 0) > SHARED.get(card, math.inf):
                needs = {"error": f"{needs['shared'] / 1024:.0f} KiB of shared memory exceed the GPU's"}
            case = {"card": card, "dtype": dtype, "head_dim": size, "form": form, "decay": decay}
            rows.append({**case, "kernel": launch.kernel.name, **needs})
    header = ["card", "type", "head", "form", "decay", "kernel", "warps", "registers", "spilled, bytes", "shared, KiB"]
    header += ["programs", "products: registers", "shared", "serialized", "instructions per 64×32"]
    keys = ["dtype", "head_dim", "form", "decay", "kernel", "warps", "registers", "spilled"]
    rest = ["programs", "from_registers", "from_shared", "serialized"]
    lines = [
        [
            f"sm_{row['card']}", *(str(row[key]) for key in keys), f"{row['shared'] / 1024:.0f}",
            *(str(row[key]) for key in rest), " / ".join(map(str, row["instructions"])),
        ]
        for row in rows
        if "error" not in row
    ]  # fmt: skip
    measure.write(a.out, "kernels", "What each kernel is compiled to:", facts, [[header, *lines]], rows)


def exists(form: str, decay: str) -> bool:
    """Whether an operator has a form: Hydra's has only the plain ones, and there are no orders without decays."""
    return not FORMS[form] if decay == "hydra" else decay != "none" or "orders" not in FORMS[form]


def launches(
    form: str, decay: str, dtype: torch.dtype, d: int, e: int, length: int = 512, card: int = 90
) -> list[Launch]:
    """Return the kernels that a forward and a backward pass launch on a card, with a mask, on operands as the model has
    them."""
    recorded: list[Launch] = []

    def record(kernel: host.Kernel, *tensors: torch.Tensor | None) -> None:
        recorded.append(Launch(kernel, tensors))

    inputs = operands(decay, dtype, d, e, length)
    with as_if_on(card), replaced(host.Kernel, "launch", record):
        step(*inputs, form)()
    return recorded


def operands(decay: str, dtype: torch.dtype, d: int, e: int, length: int, B: int = 2, H: int = 12) -> tuple:
    """Return q, k, v, log decay or logits, mask, and the tensor that q, k and v are parts of, if they are equally
    large. For Hydra, whose heads share q and k, log decays of both directions."""
    shared = decay == "hydra"
    qkv = torch.empty(B, length, 3, H, d, dtype=dtype).requires_grad_() if d == e and not shared else None
    if qkv is None:
        G = 1 if shared else H
        shapes = (G, d), (G, d), (H, e)
        q, k, v = (torch.empty(B, length, *shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes)
    else:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    given = None
    if decay == "head":
        given = torch.zeros(H).requires_grad_()
    elif decay == "token":
        given = torch.zeros(B, length, H, dtype=dtype).requires_grad_().mT
    elif shared:
        given = torch.zeros(B, length, 2, H).requires_grad_().permute(2, 0, 3, 1)
    return q, k, v, given, torch.ones(B, length, dtype=torch.bool), qkv


def step(q, k, v, given, mask, qkv, form: str, backward: bool = True) -> Callable[[], None]:
    """Return a function that takes a forward and, if requested, a backward pass as a layer of a model does."""
    how = {"form": form.partition(",")[0], **FORMS[form]}
    name = "log_decay" if given is not None and given.ndim == 1 else "forget_logits"
    parts = (q, k, v) if qkv is None else (qkv,)
    leaves = [*parts] if given is None else [*parts, given]
    tokens = torch.arange(q.shape[2])
    orders = torch.stack([tokens, tokens.flip(0)]) if how.pop("orders", 0) else None

    def run() -> None:
        if given is not None and given.ndim == 4:
            y = hydra_attention(v, Scans((q, q), (k, k), given, given), given[0], mask=mask, **how)
        elif orders is not None:  # the heads of the decays are those of both orders
            operands = (x[:, : x.shape[1] // 2] for x in (q, k, v))
            y = linear_attention_in_orders(*operands, orders=orders, **{name: given}, **how)
        else:
            y = linear_attention(*parts, mask=mask, **{name: given}, **how)
        if backward:
            torch.autograd.grad(y, leaves, y)

    return run


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def as_if_on(card: int) -> Iterator[None]:
    """Choose kernels for operands on the CPU as for a GPU of this compute capability."""
    capability = card // 10, card % 10
    host._plan.cache_clear()
    try:
        with replaced(host, "_runs_on", lambda device: True), replaced(host, "_card", lambda device: capability):
            yield
    finally:
        host._plan.cache_clear()


def specialized(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple, list]]:
    """Return the types, constants and divisibilities that determine a kernel's compiled code."""
    kernel, signature, constants, attributes = launch.kernel.kernel, {}, {}, {}
    unspecialized = {parameter.num for parameter in kernel.params if parameter.do_not_specialize}
    for place, (name, value) in enumerate(zip(kernel.arg_names, (*launch.tensors, *launch.kernel.numbers))):
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif value is None or (value == 1 and isinstance(value, int) and place not in unspecialized):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0 and place not in unspecialized:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    for name, value in launch.kernel.options.items():
        if name in kernel.arg_names:
            signature[name], constants[name] = "constexpr", value
    return {name: signature[name] for name in kernel.arg_names}, constants, attributes


def compiled(launch: Launch, card: int) -> dict[str, Any]:
    """Compile one kernel for a compute capability.

    Returns registers per thread, spilled bytes, shared bytes, warps, programs per multiprocessor; numbers of matrix
    instructions with the first operand in registers and in shared memory (on Hopper; otherwise all read registers) and
    of those serialized; and instructions of each loop per 64×32 entries. Raises the errors of Triton and ptxas.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = launch.kernel.options
    given = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    source = ASTSource(launch.kernel.kernel, *specialized(launch))
    binary = host.triton.compile(source, target=GPUTarget("cuda", card, 32), options=given)
    with tempfile.TemporaryDirectory() as folder:
        text, code = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        text.write_text(binary.asm["ptx"])
        architecture = f"sm_{card}a" if card >= 90 else f"sm_{card}"
        log = run_tool(ptxas(), "-v", f"--gpu-name={architecture}", text, "-o", code)
        assembly = run_tool(TOOLS / "cuobjdump", "-sass", code)
    registers, warps, shared = (
        int(re.findall(r"Used (\d+) registers", log)[0]),
        options["num_warps"],
        binary.metadata.shared,
    )
    stack, stored = (re.findall(rf"(\d+) bytes {what}", log) for what in ("stack frame", "spill stores"))
    threads = 32 * warps
    fit = 65536 // (-(-registers // 8) * 8 * threads), SHARED[card] // (shared + 1024), THREADS[card] // threads
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.\S+\s*\{[^}]*\},\s*(\{|%)", binary.asm["ptx"])
    from_registers = products.count("{") if products else len(re.findall(r"\bmma\.sync", binary.asm["ptx"]))
    rows, columns = options.get("T", 64), options.get("S", 32)
    scale = warps / 4 / (rows * columns / 2048)
    return {
        "registers": registers, "spilled": int(stack[0]) + int(stored[0]), "shared": shared, "warps": warps,
        "programs": min(fit), "from_registers": from_registers, "from_shared": products.count("%"),
        "serialized": log.count("C7515"), "instructions": [round(size * scale) for size in loops(assembly)],
    }  # fmt: skip


def loops(assembly: str) -> list[int]:
    """Return the number of instructions between each backward branch of a kernel and its target."""
    code = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", assembly)
    places = {int(address, 16): number for number, (address, _) in enumerate(code)}
    found = []
    for number, (address, instruction) in enumerate(code):
        target = re.search(r"\bBRA\S*\s+(?:!?U?P\d+,\s*)?`?\(?0x([0-9a-f]+)", instruction)
        if target and int(target[1], 16) < int(address, 16):
            found.append(number + 1 - places[int(target[1], 16)])
    return found


TOOLS = Path(host.triton.__file__).parent / "backends/nvidia/bin" if host.kernels.AVAILABLE else Path()


def ptxas() -> Path:
    return Path(os.environ.get("TRITON_PTXAS_PATH") or TOOLS / "ptxas")


def run_tool(*command: str | Path) -> str:
    """Return what a tool prints, in both streams. Raises ValueError with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{Path(command[0]).name} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout + done.stderr


def time_launches(decays: list[str], out: Path, facts: dict) -> None:
    """Measure the CPU's time for the operator of one layer, forward and backward, without the driver's."""
    facts |= {"device": measure.processor(), "threads": 1}
    torch.set_num_threads(1)
    rows = []
    for form, decay in itertools.product(FORMS, decays):
        if decay == "hydra" or "orders" in FORMS[form]:  # parts of them are PyTorch's, which would compute them
            continue
        inputs = operands(decay, torch.bfloat16, 64, 64, 128)
        names = [launch.kernel.name for launch in launches(form, decay, torch.bfloat16, 64, 64, 128)]
        row = {"form": form, "decay": decay, "launches": len(names), "kernels": names}
        with as_if_on(90), launching_nothing():
            for what, backward in (("forward", False), ("both", True)):
                row[f"{what}_us"] = 1e6 * program_time(step(*inputs, form, backward))
            row["compiled_us"] = 1e6 * program_time(in_compiled_model(step(*inputs, form)))
        rows.append(row)
    header = ["form", "decay", "launches", "forward, µs", "with backward, µs", "both in a compiled model, µs"]
    times = "forward_us", "both_us", "compiled_us"
    lines = [[row["form"], row["decay"], str(row["launches"]), *(f"{row[name]:.0f}" for name in times)] for row in rows]
    title = "Time of the CPU per layer, in bfloat16 at 128 tokens, with a driver that launches nothing:"
    measure.write(out, "kernels-host", title, facts, [[header, *lines]], rows)


def in_compiled_model(run: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls the two operators that a compiled model calls for what `run` computes."""
    given, differentiate = [], host._Eager.apply
    with replaced(host._Eager, "apply", lambda *inputs: given.append(inputs) or differentiate(*inputs)):
        run()
    inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in given[0]]
    of_rows = len(inputs) > len(host.ATTENTION.forward._schema.arguments)
    operators = host.ATTENTION_ROWS if of_rows else host.ATTENTION
    outputs = operators.forward(*inputs)
    leading = (*map(torch.ones_like, outputs), *outputs) if of_rows else (torch.ones_like(outputs),)
    backward_inputs = *leading, *inputs, inputs[3] is not None

    def run_operators() -> None:
        with torch.no_grad():
            operators.forward(*inputs)
            operators.backward(*backward_inputs)

    return run_operators


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """Let kernels call a launcher as Triton's compiled kernels do, but compile and launch none."""

    def find_stream(device: int) -> int:
        return 0

    def launch_nothing(*arguments) -> None:
        pass

    def runner(programs: int) -> Callable[..., None]:
        return lambda *arguments, stream=None: launch_nothing(
            programs, 1, 1, find_stream(0), None, None, None, None, None, *arguments
        )

    def launch(kernel: host.Kernel, *tensors) -> None:
        if kernel.compiled is None:
            kernel.keep(runner(kernel.programs))
        usual(kernel, *tensors)

    usual = host.Kernel.launch
    with replaced(host.Kernel, "launch", launch):
        yield


def program_time(run: Callable[[], None], count: int = 300, rounds: int = 7) -> float:
    """Return the median seconds of this thread's time in `run`."""
    for _ in range(count // 10):
        run()
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(count // rounds):
            run()
        times.append((time.thread_time() - begin) / (count // rounds))
    return statistics.median(times)


POINTERS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1",
    torch.int64: "i64", torch.int32: "i32",
}  # fmt: skip

if __name__ == "__main__":
    cli.run(main)
