"""Config keys that every command with many short runs has. A command may say in its own words what one means to it."""

from dataclasses import dataclass
from typing import Any

from src.config import SEED, duration, key
from src.training.config import SAVE_UNITS, TrainerConfig


@dataclass
class JobsConfig(TrainerConfig):
    base_run_name: str = key("name of the run; each job's name is this, its task and its seed")
    starting_checkpoint_load_path: str | None = key(
        "pretrained encoder to start from: checkpoint, Hub folder or name; null: random weights", None
    )
    model: dict[str, Any] = key("arguments of LionConfig that override those of the starting checkpoint", {})
    tasks: dict[str, Any] = key("changes to tasks by name (a list of values: a search), or new tasks", {})
    tasks_to_run: list[str] = key("names of tasks, in order; empty: all of the benchmark's", [])
    parallel: Any = key("false: one job at a time; true: one per GPU or CPU core; or the number of jobs", False)
    device_eval_batch_size: int = key("samples per evaluation batch", 128, at_least=1)
    num_workers: int | None = key(
        "processes to prepare batches; 0: the job's own; default: 2 on a GPU, 0 on a CPU", None, at_least=0
    )
    default_seed: int = key("seed of tasks without seeds", 19, **SEED)
    seeds: int | None = key("use only the first N of each task's seeds", None, at_least=1)
    save_interval: str = duration(
        "how often to save a job in progress, from which the same command resumes it", "600sec", units=SAVE_UNITS
    )
    save_finetuned_checkpoints: bool = key("keep the fine-tuned model of each job", False)
    rerun: bool = key("run finished jobs again; also as --rerun", False)
    dry_run: bool = key(
        "check the config, that the files exist, checkpoint and device, print what would run, and exit", False
    )
