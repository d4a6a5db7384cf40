"""What is faster on this machine, measured when it was first needed:

    python src/machine.py            measure what is not yet known, and print all
    python src/machine.py --forget   delete what is kept, to be measured again

The choices are files in ~/.cache/lion-bert ($XDG_CACHE_HOME), for each processor, version of torch and number of
threads. A run keeps those that it started with in its save_folder, so that a resumed run computes the same bits."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from src import cli
from src.tables import markdown


def main(argv: list[str]) -> None:
    parser = ArgumentParser(prog="machine.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--forget", action="store_true", help="delete the choices and the compiled kernel")
    if parser.parse_args(argv).forget:
        forget()
    else:
        report()


def report() -> None:
    import torch

    from src.lion import cpu_crossover, cpu_kernel, cpu_linear, machine

    print(f"{machine.processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    how = "compiled kernel" if cpu_kernel.is_available() else "PyTorch, slower"
    print(f"\nlinear attention    {how}{cpu_kernel.reason()}")
    if cpu_kernel.is_available():
        print("                    with decay, attention_form: auto is the full form up to this many tokens:\n")
        lines = [["", "training", "inference"]]
        for name, kind in zip(("plain", "rows divided by their sums", "in two orders"), cpu_crossover.KINDS):
            up_to = cpu_crossover.full_up_to(kind)
            lines.append([name, f"{up_to['training']:,}", f"{up_to['inference']:,}"])
        print(markdown(lines) + "\n")
    if not cpu_linear.can_choose():
        print("linear layers       by torch, which lacks MKL or oneDNN here")
    else:
        found = machine.choice("onednn_from", cpu_linear.measure)
        print("linear layers       in float32, by MKL or oneDNN:\n")
        lines = [[name, *map(described, products)] for name, products in found.items()]
        print(markdown([["weights", "output", "gradient of the input", "of the weights"], *lines]))
    print("\nkept in", *(machine.kept() or ["no file yet"]), sep="\n  ")


def described(changes: list[int]) -> str:
    """Of the numbers of tokens that `cpu_linear.measure` found for a product."""
    ranges = [f"{start:,} to {end - 1:,}" for start, end in zip(changes[::2], changes[1::2])]
    if len(changes) % 2:
        ranges.append(f"from {changes[-1]:,}")
    return f"oneDNN: {', '.join(ranges)} tokens" if ranges else "MKL"


def forget() -> None:
    from src.lion import machine

    for path in machine.kept():
        path.unlink(missing_ok=True)
        print(f"deleted {path}")


if __name__ == "__main__":
    cli.run(main)
