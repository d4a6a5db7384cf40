"""Config keys that every run has, whatever it trains."""

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from src.config import SECONDS, SEED, TIME_UNITS, Config, duration, key, load, oldest
from src.errors import UserError
from src.training import changes

OF_FOLDERS = {  # in yamls/
    "pretrain": "main.py", "finetune-glue": "glue.py", "lra": "lra.py", "vision": "vision.py", "embed": "embed.py",
}  # fmt: skip
COUNT = {"at_least": 1, "at_most": 2**32 - 1}
COUNT_OR_ALL = {"at_least": 1, "also": (-1,), "may_change": True}
OWN = ", or module:Class"  # see src/training/own_code.py
SAVE_UNITS = (*TIME_UNITS, *SECONDS)
DDP_SYNC = ("single_auto_sync", "multi_auto_sync", "forced_sync")


def state_passing() -> float:
    """Declare a config key that text models share."""
    meaning = (
        "probability with which a text gets the final states of another text of its microbatch, as if that stood on "
        "both sides of it, so that the model reads longer texts than it is trained on (experimental; for the last few "
        "hundred steps, in a run of their own; without packing)"
    )
    return key(meaning, 0.0, at_least=0, at_most=1)


def check_state_passing(probability: float, packing: bool, packing_key: str, microbatch: Any) -> None:
    """Raise UserError for rows that hold several texts, and for microbatches that hold one."""
    given = f"state_passing={probability}"
    if probability and packing:
        raise UserError(f"{given} needs one text per row; set {packing_key}=false, or omit state_passing")
    if probability and microbatch == 1:
        raise UserError(f"{given} has no effect with device_train_microbatch_size=1; raise that, or omit state_passing")


@dataclass
class TrainerConfig:
    """Keys shared by all training, one long run or many short ones."""

    model_config: ClassVar[str] = "LionConfig"  # the class in src/lion whose arguments `model` has

    scheduler: dict[str, Any] = key(f"name, such as linear_decay_with_warmup{OWN}, and arguments")
    algorithms: dict[str, Any] = key(f"by name, with arguments: gradient_clipping, …{OWN}", {})
    callbacks: dict[str, Any] = key(f"by name, with arguments: speed_monitor, …{OWN}", {}, may_change=True)
    loggers: dict[str, Any] = key(f"by name: tensorboard, wandb, mlflow, file{OWN}", {}, may_change=True)
    code_paths: list[str] = key(
        "Python files to import first, on every rank: my_classes.py provides my_classes:Class. They are executed; a "
        "resumed run uses them as they are then",
        [],
        may_change=True,
    )
    log_level: str = key(
        "least severe messages to print; of Composer and streaming, warnings and errors unless this is debug",
        "info",
        choices=("debug", "info", "warning", "error"),
        may_change=True,
    )
    precision: str | None = key("default: amp_bf16; on a CPU fp32", None, choices=("fp32", "amp_bf16", "amp_fp16"))
    device: str | None = key("default: a GPU if there is one", None, choices=("gpu", "cpu"), may_change=True)
    save_folder: str = key("folder for everything the command writes", may_change=True)
    progress_bar: bool = key("show progress and time left", True, may_change=True)

    def check(self) -> None:
        """Check what the rules of individual keys cannot. Raises UserError."""
        for name in ("save_folder", "save_remote", "load_path"):
            if "{" in (value := getattr(self, name, None) or ""):
                raise UserError(f"{name}={value}: Composer would replace the braces; refer to keys as ${{run_name}}")
        if not self.save_folder.strip():
            raise UserError("save_folder is empty; name a folder")
        if "://" in self.save_folder:
            raise UserError(
                f"save_folder={self.save_folder} is not a local folder; choose one, and set save_remote to upload it"
            )


@dataclass
class RunConfig(TrainerConfig):
    """Keys of one run with checkpoints."""

    # Values that leave the choice to a new run. A resumed run keeps what was chosen: compiled models, for instance,
    # round differently and draw other dropout.
    chosen_at_first: ClassVar[dict[str, Any]] = {"compile_config": "auto"}
    weights_key: ClassVar[str] = "model.pretrained_checkpoint"  # names the weights alone that a run starts from

    run_name: str = key("name of the run")
    optimizer: dict[str, Any] = key(
        f"name{OWN}, and arguments; filter_bias_norm_wd: true exempts biases and norms from weight decay"
    )
    max_duration: str = duration("length of training", units=("ba", "sp", "ep", "tok"), may_change=True)
    eval_interval: str = duration("how often to evaluate", may_change=True)
    eval_first: bool = key("evaluate the untrained model too, for comparison", True, may_change=True)
    eval_subset_num_batches: int = key("batches per evaluation; -1: all", -1, **COUNT_OR_ALL)
    global_train_batch_size: int = key("batch size: samples per optimizer step, on all devices", at_least=1)
    device_train_microbatch_size: Any = key(
        "samples per device and forward pass, or auto (FSDP on GPUs)",
        at_least=1,
        whole=True,
        also=("auto",),
        may_change=True,
    )
    device_eval_batch_size: int = key("samples per device and evaluation batch", may_change=True, **COUNT)
    float32_matmul_precision: str = key(
        "for float32 products: high may use TF32, medium bfloat16", "highest", choices=("highest", "high", "medium")
    )
    seed: int = key("seed for weights, dropout, data order and masks", **SEED)
    save_interval: str = duration("how often to save a checkpoint", units=SAVE_UNITS, may_change=True)
    save_num_checkpoints_to_keep: int = key("how many of the newest to keep; -1: all", -1, **COUNT_OR_ALL)
    save_best: str | None = key(
        "also keep the checkpoint that is best by this curve, as best-rank0.pt: loss, accuracy, top1, ndcg, …",
        None,
        may_change=True,
    )
    save_remote: str | None = key(
        "where to upload save_folder in the background, and to resume from if that is empty or older: s3://…, gs://…, "
        "oci://… or a folder; keeps every checkpoint",
        None,
        may_change=True,
    )
    load_path: str | None = key(
        "checkpoint to start from, with optimizer state and position in the data: a file, s3://…, gs://… or oci://…",
        None,
    )
    load_position: bool = key(
        "continue load_path's steps, schedule and data; false: from step 0, with its weights and the state of its "
        "optimizer and algorithms",
        True,
    )
    resume_with: list[str] = key(
        "keys that this command changes in a run that it resumes: of optimizer and scheduler, global_train_batch_size, "
        "max_duration",
        [],
        may_change=True,
    )
    history: list[dict[str, Any]] = key("changes of resume_with so far; kept by the command", [], may_change=True)
    autoresume: bool = key("resume from the last checkpoint in save_folder, if there is one", True, may_change=True)
    on_nonfinite_loss: str = key("end the run, or skip the update", "stop", choices=("stop", "skip"), may_change=True)
    activation_checkpointing: bool = key("recompute layers in the backward pass: less memory", False, may_change=True)
    fsdp_config: dict[str, Any] = key("arguments of Composer's FSDPConfig; empty: DDP", {}, may_change=True)
    ddp_sync_strategy: str | None = key(
        "when DDP sums gradients; default: after the last microbatch", None, choices=DDP_SYNC, may_change=True
    )
    dist_timeout: float = key("seconds a device waits for the others", 300.0, above=0, may_change=True)
    compile_config: Any = key(
        "arguments of torch.compile; null: not used; auto: its defaults on a GPU, where the first steps then take "
        "minutes; a resumed run keeps its choice",
        None,
        may_change=True,
    )
    hf_export: str | None = key("write Hub folders to save_folder/hub", None, choices=("end", "save"), may_change=True)
    log_interval: str = duration("how often to write a line to metrics.jsonl", "10ba", units=("ba",), may_change=True)

    def check(self) -> None:
        super().check()
        clipping = self.algorithms.get("gradient_clipping")
        by_value = isinstance(clipping, dict) and clipping.get("clipping_type") == "value"
        if self.on_nonfinite_loss == "skip" and by_value:  # clipping comes first, and hides infinite gradients
            raise UserError("on_nonfinite_loss=skip cannot see infinite gradients clipped by value; clip by norm")
        if self.algorithms.get("ema", False) is not False and self.fsdp_config:
            raise UserError("algorithms.ema averages whole weights, which fsdp_config shards; omit one")
        changes.check(self.resume_with)
        section = getattr(self, "model", {})
        if self.load_path is not None and section.get("pretrained_checkpoint") is not None:
            raise UserError("load_path and model.pretrained_checkpoint both name what to start from; omit one")
        if self.load_path is None and not self.load_position:
            raise UserError("load_position=false is about load_path; set that, or omit it")
        if not (isinstance(self.compile_config, dict) or self.compile_config in (None, "auto")):
            raise UserError(
                f"compile_config={self.compile_config} must be auto, null or a section, such as compile_config.mode=…"
            )
        if self.activation_checkpointing and self.fsdp_config.get("activation_checkpointing"):
            raise UserError("activation_checkpointing is set twice, here and in fsdp_config; omit one")


def load_config(
    schema: type[Config], script: str, example: str, argv: list[str], commands: Collection[str] = ()
) -> Config:
    """Load the config of a command that trains; `--help` also lists the arguments of everything chosen by name."""
    more_help = ""
    if not {"-h", "--help"}.isdisjoint(argv):
        from src import lion  # whose imports take seconds, as the registry's
        from src.training.registry import describe_arguments

        more_help = describe_arguments(getattr(lion, schema.model_config), [entry.name for entry in fields(schema)])
    path = next((Path(argument) for argument in argv if os.path.isfile(argument)), None)
    if path is not None and (other := command_of(path)) not in (None, script):
        raise UserError(f"{path} is a config of {other}; run python {other} {path}")
    config = load(schema, script, argv, example, more_help, commands)
    config.check()
    return config


def command_of(path: Path) -> str | None:
    """Return the command whose recipes a YAML file goes back to, or None if it is of no folder in yamls/."""
    with contextlib.suppress(Exception):  # it is not YAML, or what it inherits is gone
        folder = oldest(path).resolve().parent
        return OF_FOLDERS.get(folder.name) if folder.parent == Path(__file__).resolve().parents[2] / "yamls" else None
    return None
