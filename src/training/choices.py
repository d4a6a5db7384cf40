"""A run on a CPU computes as it did on the machine that started it, see src/lion/machine.py, so that rounding does not
change on the way: its choices are in its folder."""

import contextlib
import json
from pathlib import Path

from src.cli import log
from src.errors import UserError
from src.files import write_json
from src.lion import cpu_crossover, cpu_kernel, cpu_linear, machine

MACHINE = "machine.json"


def _changes(kept: list[int] | int | None) -> list[int]:
    """As of `cpu_linear.measure`; earlier versions kept the number from which on oneDNN was used, or null."""
    return kept if isinstance(kept, list) else [] if kept is None else [int(kept)]


def recall(folder: Path, results: str) -> dict:
    """Compute as the run in this folder does, or, if it is new, as is fastest here, and return the choices. A run that
    already has `results`, a pattern of files, but no choices was started before there were any. Raises UserError."""
    path = folder / MACHINE
    machine.adopt({})
    try:
        choices = json.loads(path.read_text())
        if not isinstance(choices, dict) or not isinstance(choices.get("native"), bool):
            raise ValueError
        if "convolutions" in choices:  # a key of the first version: booleans, True from 1,024 tokens on
            of_shapes = choices.pop("convolutions").items()
            choices["onednn_from"] = {shape: [[1024] if one else [] for one in each] for shape, each in of_shapes}
        if "convolved_from" in choices:  # a key of the second, which called another function of oneDNN
            choices["onednn_from"] = choices.pop("convolved_from")
        found = choices.get("onednn_from", cpu_linear.NEVER).items()  # both omitted it with one thread
        choices["onednn_from"] = {shape: [_changes(each) for each in products] for shape, products in found}
        plain = choices.setdefault("full_up_to", {"inference": 192, "training": 192})  # which was fixed once
        for kind in cpu_crossover.KINDS:
            up_to = choices.setdefault(f"full_up_to{kind}", plain)  # which all kinds shared once
            if not all(isinstance(up_to[mode], int) for mode in ("inference", "training")):
                raise ValueError
    except FileNotFoundError:
        if next(folder.glob(results), None) is not None:
            choices = {"native": False, "onednn_from": dict.fromkeys(cpu_linear.SHAPES, [[1024]] * 3)}
        else:
            choices = {"native": cpu_kernel.is_available()}
            if choices["native"]:
                choices |= {f"full_up_to{kind}": cpu_crossover.full_up_to(kind) for kind in cpu_crossover.KINDS}
            choices["onednn_from"] = cpu_linear.NEVER
            if cpu_linear.can_choose():
                choices["onednn_from"] = machine.choice("onednn_from", cpu_linear.measure)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        raise UserError(f"save_folder: {path} is corrupt; delete it to resume, perhaps with other rounding") from None
    machine.adopt(choices)
    if choices["native"] and not cpu_kernel.is_available():
        problem = f"this run started with the compiled kernel, which is not available here{cpu_kernel.reason()}"
        log.warning(f"{problem}; it resumes in PyTorch, slower and with other dropout")
    return choices


def keep(choices: dict, folder: Path) -> None:
    """Write the choices beside the results."""
    if not (folder / MACHINE).exists():
        with contextlib.suppress(OSError):  # a full disk ends the run where it saves
            write_json(folder / MACHINE, choices)
