"""The section `finetune_eval` of `main.py`: how glue.py fine-tunes copies of the model during pretraining."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from src.config import duration, key
from src.errors import UserError
from src.publish.background import ALONE

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "glue.py"  # a process of its own, since no command imports another
RECIPE = "yamls/finetune-glue/recipe.yaml"


@dataclass
class FinetuneEval:
    """Keys of the section."""

    tasks: list[str] = key(
        "tasks to fine-tune copies of the model on, beside the run; empty: none", [], may_change=True
    )
    interval: str = duration("fine-tune the first checkpoint at or after each", "10000ba", may_change=True)
    config: str | None = key(
        f"config of glue.py, also for tasks of one's own; default: {RECIPE}", None, may_change=True
    )
    seeds: int = key("how many of each task's seeds to use", 1, at_least=1, may_change=True)
    device: str | None = key(
        "cpu, or a GPU as in CUDA_VISIBLE_DEVICES; default: the last one that the run sees", None, may_change=True
    )

    def check(self) -> None:
        """Raise UserError for what the rules of the keys cannot see."""
        if self.device is not None and not re.fullmatch(r"cpu|\d+|(GPU|MIG)-\S+", self.device):
            raise UserError(f"finetune_eval.device={self.device} must be cpu or the number of a GPU, such as 7")

    def arguments(self, folder: Path, name: str) -> list[str]:
        """Return the arguments of glue.py for results in a folder, without the checkpoint and the device."""
        given = {"tasks_to_run": self.tasks, "seeds": self.seeds, "save_folder": str(folder), "base_run_name": name}
        given |= {"progress_bar": False, "rerun": False, "tokens_folder": str(folder.parent / "tokens")}
        return [self.config or str(ROOT / RECIPE), *(f"{each}={json.dumps(value)}" for each, value in given.items())]

    def check_tasks(self, folder: Path, tokenizer: str) -> None:
        """Let glue.py check its config, the tasks, their files and the device. Raises UserError."""
        start = ["starting_checkpoint_load_path=null", f"tokenizer_name={json.dumps(tokenizer)}"]  # no checkpoint yet
        gpu = None if self.device in (None, "cpu") else self.device
        device = f"device={'gpu' if gpu else json.dumps(self.device)}"
        command = [sys.executable, str(SCRIPT), *self.arguments(folder, "dry-run"), *start, device, "dry_run=true"]
        environment = {name: value for name, value in os.environ.items() if name not in ALONE}
        environment |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.splitlines() or [f"exit status {done.returncode}"]
            where = f"finetune_eval{f' (device={gpu})' if gpu else ''}"
            raise UserError(f"{where}: glue.py reports: {said[-1].removeprefix('error: ')}")
