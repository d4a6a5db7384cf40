"""Config → Composer objects. The only place that knows names; main.py and glue.py share it."""

import functools
import inspect
import logging
import os
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from composer import Algorithm, Callback, DataSpec, Evaluator, Time, Timestamp, TimeUnit, Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import (
    LRMonitor,
    MemoryMonitor,
    MemorySnapshot,
    OOMObserver,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    SystemMetricsMonitor,
)
from composer.distributed import DDPSyncStrategy
from composer.distributed.mosaic_parallelism import BACKWARD_PREFETCH_MAP, SHARDING_MAP
from composer.loggers import FileLogger, LoggerDestination, MLFlowLogger, WandBLogger
from composer.optim import (
    ComposerScheduler,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearWithWarmupScheduler,
)
from composer.utils import FSDPConfig
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.activations import ACT2FN
from transformers.utils import logging as transformers_logging

from src.checkpoints.reading import ARGUMENTS, check_argument
from src.config import nearest
from src.data import mlm_collator
from src.data.tokenizers import load_tokenizer
from src.errors import UserError, first_line
from src.lion import LionConfig
from src.training.early_stopper import ResumableEarlyStopper
from src.training.optim import FusedDecoupledAdamW
from src.training.schedule import WarmupStableDecayScheduler
from src.training.tensorboard import TensorBoard


def gradient_clipping(clipping_type: str, clipping_threshold: float) -> GradientClipping:
    """Composer's, which looks at its arguments in the first step."""
    check_choice("algorithms.gradient_clipping.clipping_type", clipping_type, ("adaptive", "norm", "value"))
    if not float(clipping_threshold) > 0:
        raise ValueError(f"clipping_threshold {clipping_threshold} is not above 0")
    return GradientClipping(clipping_type, float(clipping_threshold))


OPTIMIZERS = {"decoupled_adamw": FusedDecoupledAdamW, "adamw": functools.partial(torch.optim.AdamW, fused=True)}
SCHEDULERS = {
    "linear_decay_with_warmup": LinearWithWarmupScheduler,
    "cosine_with_warmup": CosineAnnealingWithWarmupScheduler,
    "constant": ConstantScheduler,
    "constant_with_warmup": ConstantWithWarmupScheduler,
    "warmup_stable_decay": WarmupStableDecayScheduler,
}
ALGORITHMS = {"gradient_clipping": gradient_clipping}
CALLBACKS = {
    "early_stopper": ResumableEarlyStopper,
    "lr_monitor": LRMonitor,
    "memory_monitor": MemoryMonitor,
    "memory_snapshot": MemorySnapshot,
    "oom_observer": OOMObserver,
    "optimizer_monitor": OptimizerMonitor,
    "runtime_estimator": RuntimeEstimator,
    "speed_monitor": SpeedMonitor,
    "system_metrics_monitor": SystemMetricsMonitor,
}
TIME_UNITS = {"ba": "batches", "sp": "samples", "ep": "epochs", "tok": "tokens", "dur": "a share of the run"}
LOGGERS = {"file": FileLogger, "mlflow": MLFlowLogger, "tensorboard": TensorBoard, "wandb": WandBLogger}
DDP_SYNC_STRATEGIES = tuple(strategy.value for strategy in DDPSyncStrategy)
FSDP_CHOICES = {  # of fsdp_config; a checkpoint is one file, and Composer has no offloading of parameters yet
    "sharding_strategy": tuple(SHARDING_MAP),
    "backward_prefetch": tuple(BACKWARD_PREFETCH_MAP),
    "state_dict_type": ("full",),
    "cpu_offload": (False,),
}


def build_tokenizer(name: str, max_seq_len: int) -> PreTrainedTokenizerBase:
    """A tokenizer from a folder or the Hub. Raises UserError where it is neither, or has no [MASK] or [PAD]."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches are prepared in processes of their own
    tokenizer = load_tokenizer(name, "tokenizer_name", model_max_length=max_seq_len)
    for token in ("mask_token", "pad_token"):
        if getattr(tokenizer, token) is None:
            raise UserError(f"tokenizer_name: {name} has no {token}, which masked language modelling needs")
    return tokenizer


def build_lion_config(arguments: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_seq_len: int) -> LionConfig:
    """LionConfig from the `model` section. The vocabulary is the tokenizer's, rounded up to a multiple of 8.

    Raises UserError for an unknown argument, or sizes that do not fit the tokenizer or the text length.
    """
    check_known("model", arguments, ARGUMENTS)
    try:
        for name, value in arguments.items():
            check_argument(name, value)
    except ValueError as error:
        raise UserError(f"model.{error}") from None
    check_choice("model.hidden_act", arguments.get("hidden_act", "gelu"), tuple(ACT2FN))
    options = {"vocab_size": -(-len(tokenizer) // 8) * 8, "pad_token_id": tokenizer.pad_token_id, **arguments}
    try:
        config = LionConfig(**options)
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    if config.vocab_size < len(tokenizer):
        raise UserError(f"model.vocab_size {config.vocab_size} is less than the tokenizer's {len(tokenizer)} tokens; leave it out to have it fit")  # fmt: skip
    if config.has_positions and config.max_position_embeddings < max_seq_len:
        raise UserError(f"max_seq_len {max_seq_len} is more than model.max_position_embeddings {config.max_position_embeddings}, the positions that {config.mixer} has")  # fmt: skip
    if (
        config.mixer != "softmax"
        and config.attention_form not in ("auto", "full")
        and config.attention_probs_dropout_prob
    ):
        raise UserError(f"model.attention_probs_dropout_prob needs the full form, not {config.attention_form}; set it to 0, or attention_form to full")  # fmt: skip
    return config


def lion_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a stored configuration, what LionConfig takes by name."""
    return {name: settings[name] for name in ARGUMENTS if name in settings}


def arguments_by_name() -> str:
    """What the sections of a config that begin with a name take, with defaults, for `--help`."""
    own = {"optimizer": ["filter_bias_norm_wd=False"]}  # see build_optimizer
    registries = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS, "algorithms": ALGORITHMS, "callbacks": CALLBACKS, "loggers": LOGGERS}  # fmt: skip
    made = {"model:": LionConfig, "fsdp_config:": FSDPConfig, "compile_config:": torch.compile}
    made |= {f"{kind}: {name}": cls for kind, registry in registries.items() for name, cls in registry.items()}
    lines = []
    for name, cls in made.items():
        shown = [
            argument if default is inspect.Parameter.empty else f"{argument}={default!r}"
            for argument, default in arguments_of(cls).items()
        ]
        words = ", ".join(shown + own.get(name.split(":")[0], [])) or "no arguments"
        lines += [f"  {name}", textwrap.fill(words, 112, initial_indent=" " * 8, subsequent_indent=" " * 8)]
    return "\n".join(lines)


def arguments_of(cls: Callable) -> dict[str, Any]:
    """What a class or function takes from a config, with defaults; inspect.Parameter.empty where there is none."""
    if cls is FSDPConfig:  # takes whatever it is given
        return {entry.name: entry.default for entry in fields(cls) if entry.init}
    return {
        name: entry.default
        for name, entry in inspect.signature(cls).parameters.items()
        if name not in ("params", "model") and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
    }


def check_known(section: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserError for a key of a section that it does not know."""
    if unknown := next((name for name in given if name not in known), None):
        raise UserError(f"unknown key {section}.{unknown}{nearest(unknown, list(known))}")


def build_optimizer(section: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over the model's parameters. `filter_bias_norm_wd: true` decays matrices alone, not biases and norms."""
    section = dict(section)
    betas = section.get("betas", (0.9, 0.98))
    if not (isinstance(betas, list | tuple) and len(betas) == 2):
        raise UserError(f"optimizer.betas must be two numbers, such as [0.9, 0.98], not {betas!r}")
    without_decay = section.pop("filter_bias_norm_wd", False)
    parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if without_decay:
        parameters = [
            {"params": [p for p in parameters if p.ndim >= 2]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
    return build("optimizer", OPTIMIZERS, section, params=parameters)


def build_scheduler(section: Mapping[str, Any], max_duration: str = "1ep") -> ComposerScheduler:
    """A learning-rate schedule, tried at both ends of a run of `max_duration`. Raises UserError where that fails."""
    if section.get("t_warmup") is not None:
        check_time("scheduler.t_warmup", section["t_warmup"], tuple(TIME_UNITS), zero=True)
    scheduler = build("scheduler", SCHEDULERS, section)
    begin = SimpleNamespace(
        max_duration=Time.from_timestring(max_duration),
        timestamp=Timestamp(),
        dataloader_len=Time.from_batch(1000),
        get_elapsed_duration=lambda: Time(0.0, TimeUnit.DURATION),
    )
    late = Timestamp(epoch=10**12, batch=10**12, sample=10**12, token=10**12)
    end = SimpleNamespace(
        **{**vars(begin), "timestamp": late, "get_elapsed_duration": lambda: Time(1.0, TimeUnit.DURATION)}
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warm-up of no step
            scheduler(begin), scheduler(end)
    except Exception as error:  # Composer finds out here, and in no one way, what it cannot compute
        raise UserError(f"scheduler: {section['name']} refuses these arguments: {error}") from None
    return scheduler


def build_algorithms(section: Mapping[str, Any]) -> list[Algorithm]:
    return _build_all("algorithms", ALGORITHMS, section)


def build_callbacks(section: Mapping[str, Any]) -> list[Callback]:
    return _build_all("callbacks", CALLBACKS, section)


def build_loggers(section: Mapping[str, Any]) -> list[LoggerDestination]:
    return _build_all("loggers", LOGGERS, section)


def build(kind: str, registry: Mapping[str, Callable], section: Mapping[str, Any], **fixed: Any) -> Any:
    """The object that a section's `name` stands for, with the section's other keys as arguments.

    An unknown argument that is null is left out: so a file can drop what it inherits for an object of another name.
    Raises UserError for an unknown name, an unknown argument, or arguments that the class refuses.
    """
    arguments = dict(section)
    name = arguments.pop("name", None)
    if name not in registry:
        raise UserError(f"{kind}: unknown name {name!r}{nearest(str(name), list(registry))}")
    known = [parameter for parameter in inspect.signature(registry[name]).parameters if parameter not in fixed]
    if "kwargs" not in known:
        arguments = {argument: value for argument, value in arguments.items() if argument in known or value is not None}
        if unknown := next((argument for argument in arguments if argument not in known), None):
            raise UserError(f"unknown key {kind}.{unknown}{nearest(unknown, known)} (an inherited one that {name} does not have goes with {kind}.{unknown}=null)")  # fmt: skip
    try:
        return registry[name](**fixed, **arguments)
    except UserError:
        raise
    except Exception as error:  # whatever a class of torch or Composer raises
        raise UserError(f"{kind}: {name} refuses these arguments: {error}") from None


def _build_all(kind: str, registry: Mapping[str, Callable], sections: Mapping[str, Any]) -> list[Any]:
    wanted = {name: arguments for name, arguments in sections.items() if arguments is not False}
    for name, arguments in wanted.items():
        if arguments is not None and not isinstance(arguments, Mapping):
            raise UserError(f"{kind}.{name} must hold its arguments as `key: value` lines, not {arguments!r}")
    return [
        build(f"{kind}.{name}" if name in registry else kind, registry, {"name": name, **(arguments or {})})
        for name, arguments in wanted.items()
    ]


def resolve_device(device: str | None) -> str:
    """ "gpu" or "cpu": what is asked for, or a GPU if there is one. Raises UserError for a GPU that is not there."""
    there = torch.cuda.is_available()
    if device is None:
        return "gpu" if there else "cpu"
    if device not in ("gpu", "cpu"):
        raise UserError(f"device: {device!r} is neither gpu nor cpu")
    if device == "gpu" and not there:
        raise UserError("device: no GPU is there; set device=cpu or leave it out")
    return device


def resolve_precision(precision: str | None, device: str) -> str:
    """The precision to train in: what is asked for, or amp_bf16 on a GPU and fp32 on a CPU."""
    if precision is None:
        return "amp_bf16" if device == "gpu" else "fp32"
    allowed = ("fp32", "amp_bf16", "amp_fp16") if device == "gpu" else ("fp32", "amp_bf16")
    if precision not in allowed:
        raise UserError(f"precision: {precision!r} is none of {', '.join(allowed)}, which a {device} can")
    return precision


def build_data_spec(dataloader: Any) -> DataSpec:
    """How Composer counts and splits batches of text, in which several samples may share a row."""
    return DataSpec(
        dataloader,
        split_batch=mlm_collator.split_batch,
        get_num_samples_in_batch=mlm_collator.sample_count,
        get_num_tokens_in_batch=mlm_collator.token_counts,
    )


def build_evaluator(label: str, dataloader: Any) -> Evaluator:
    """All of the model's metrics on one split."""
    return Evaluator(label=label, dataloader=dataloader, device_eval_microbatch_size=dataloader.batch_size)


def build_trainer(
    model: nn.Module, *, device: str, precision: str, float32_matmul_precision: str = "highest", **arguments: Any
) -> Trainer:
    """Composer's Trainer, quiet but for warnings that a user can act on. bfloat16 on a CPU is the model's business."""
    quiet()
    if device == "cpu" and precision == "amp_bf16":
        model.cpu_bfloat16 = True
        precision = "fp32"
    trainer = Trainer(model=model, device=device, precision=precision, progress_bar=False, **arguments)
    torch.set_float32_matmul_precision(float32_matmul_precision)  # Composer's device for GPUs has just allowed TF32
    return trainer


def quiet() -> None:
    """Keep libraries from saying what no user of this project can act on."""
    transformers_logging.set_verbosity_error()
    logging.getLogger("composer").setLevel(logging.ERROR)
    logging.getLogger("streaming").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(composer|torch|torchmetrics|streaming)\b.*")


def check_times(**times: Any) -> None:
    """Raise UserError for a key whose value is no time above 0, such as 1000ba, in a unit that the key can have."""
    units = {"max_duration": ("ba", "sp", "ep", "tok"), "log_interval": ("ba",)}
    for name, value in times.items():
        check_time(name, value, units.get(name, tuple(TIME_UNITS)))


def check_time(name: str, value: Any, units: tuple[str, ...], zero: bool = False) -> None:
    """Raise UserError for what is no time in one of these units, above 0 or from it on."""
    try:
        time = Time.from_timestring(value)
        good = time.unit.value in units and (time.value > 0 or (zero and time.value == 0))
    except (ValueError, TypeError, OverflowError):
        good = False
    if not good:
        known = " or ".join(f"{unit} ({TIME_UNITS[unit]})" for unit in units)
        raise UserError(f"{name}: {value!r} is no time; give a number{'' if zero else ' above 0'} and {known}, such as 10ba")  # fmt: skip


def check_choice(name: str, value: Any, allowed: tuple) -> None:
    """Raise UserError for a key with another value than those it knows."""
    if value not in allowed:
        raise UserError(f"{name}: {value!r} is none of {', '.join(map(str, allowed))}")


def check_fsdp(section: Mapping[str, Any]) -> None:
    """Raise UserError for an fsdp_config that Composer would pass over, or stumble over."""
    check_known("fsdp_config", section, arguments_of(FSDPConfig))
    for name in FSDP_CHOICES.keys() & section.keys():
        check_choice(f"fsdp_config.{name}", section[name], FSDP_CHOICES[name])


def parallelism(fsdp_config: Mapping[str, Any], device: str) -> dict[str, Any] | None:
    """Composer's parallelism_config. Raises UserError for FSDP without GPUs."""
    if not fsdp_config:
        return None
    if device != "gpu":
        raise UserError("fsdp_config shards a model over GPUs, and this run is on a cpu; leave it out")
    return {"fsdp": dict(fsdp_config)}


def check_compile(section: Any) -> None:
    """Raise UserError for a compile_config that torch.compile refuses."""
    if section is None:
        return
    if not isinstance(section, Mapping):
        raise UserError(f"compile_config must hold `key: value` lines, {{}} or null, not {section!r}")
    check_known("compile_config", section, arguments_of(torch.compile))
    if "backend" in section and section["backend"] not in (known := torch._dynamo.list_backends(None)):
        raise UserError(f"compile_config.backend: unknown name {section['backend']!r}{nearest(str(section['backend']), known)}")  # fmt: skip
    try:
        torch.compile(nn.Identity(), **section)
    except Exception as error:  # of a mode or an option
        raise UserError(f"compile_config: torch.compile refuses these arguments: {first_line(error)}") from None


def check_batch_sizes(global_batch: int, microbatch: Any, world_size: int, device: str) -> int:
    """Samples a device takes in one step. Raises UserError where the sizes do not divide, or the device cannot find them."""
    if global_batch < 1:
        raise UserError(f"global_train_batch_size {global_batch} must be at least 1")
    if global_batch % world_size:
        raise UserError(f"global_train_batch_size {global_batch} cannot be divided among {world_size} devices")
    device_batch = global_batch // world_size
    if microbatch == "auto" and device != "gpu":
        raise UserError(f"device_train_microbatch_size: auto finds what fits on a GPU, and this run is on a cpu; give a number, such as {device_batch}")  # fmt: skip
    if microbatch != "auto" and not (isinstance(microbatch, int) and 1 <= microbatch <= device_batch):
        raise UserError(f"device_train_microbatch_size {microbatch} must be auto or between 1 and the {device_batch} samples of a device's batch")  # fmt: skip
    return device_batch
