"""Pretrain an encoder as a masked language model:  [composer -n N] main.py yamls/pretrain/lion-s-base.yaml [key=value ...]"""

import contextlib
import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

from src import cli
from src.cli import is_main_process, log
from src.config import load, to_dict
from src.errors import RunFailed, UserError
from src.files import check_writable, exclusive_lock
from src.mlm.config import PretrainConfig


def main(argv: list[str]) -> None:
    config = load(PretrainConfig, "main.py", argv)  # before the imports of `pretrain`, which take seconds
    folder = Path(config.save_folder)
    check_save_folder(config, folder)
    with exclusive_lock(folder, "main.py") if is_main_process() else contextlib.nullcontext():
        if is_finished(config, folder):
            log.info(f"{config.run_name} is finished already, with this config")
        else:
            pretrain(config, folder)
        if is_main_process():
            report(folder)
            if config.hf_export is not None:
                from src.publish.callback import export_last

                print(f"\nHub folder    {export_last(folder)}")


def pretrain(config: PretrainConfig, folder: Path) -> None:
    """One run, from config to trained checkpoint, curves and metrics in `save_folder`."""
    from composer.utils import dist, reproducibility
    from tqdm.contrib.logging import logging_redirect_tqdm

    from src.data import streaming
    from src.memory import keep_freed_memory
    from src.publish import callback
    from src.training import checkpointing, guards, registry
    from src.training.run_log import RunLog
    from src.training.startup import Startup

    startup = Startup()
    registry.quiet()
    check(config)
    device = registry.resolve_device(config.device)
    if device == "cpu":
        keep_freed_memory()
    precision = registry.resolve_precision(config.precision, device)
    device_batch = registry.check_batch_sizes(
        config.global_train_batch_size, config.device_train_microbatch_size, dist.get_world_size(), device
    )
    scheduler = registry.build_scheduler(config.scheduler, config.max_duration)
    algorithms = registry.build_algorithms(config.algorithms)
    tokenizer = registry.build_tokenizer(config.tokenizer_name, config.max_seq_len)
    reproducibility.seed_all(config.seed)
    saved = checkpointing.newest_whole(folder)
    model = build_model(config, tokenizer, saved)
    if config.activation_checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    # Counted here, since FSDP will leave each device a share of them.
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = registry.build_optimizer(config.optimizer, model)
    if saved is None and config.load_path is not None:
        check_load_path(config, model)
    startup.done("tokenizer and model")
    if dist.get_world_size() > 1:  # before streaming does, which takes NCCL wherever there is a GPU
        dist.initialize_dist(device, config.dist_timeout)
    train_loader = streaming.build(config.train_loader, tokenizer, device_batch, train=True)
    eval_loader = streaming.build(config.eval_loader, tokenizer, config.device_eval_batch_size, train=False)
    padding = train_loader.padding
    startup.done("data")
    run_log = RunLog(folder, config.log_interval, config.run_name, config.progress_bar, padding)
    writer = checkpointing.CheckpointWriter(folder, config.save_interval, config.save_num_checkpoints_to_keep)
    trainer = registry.build_trainer(
        model,
        device=device,
        precision=precision,
        float32_matmul_precision=config.float32_matmul_precision,
        run_name=config.run_name,
        seed=config.seed,
        train_dataloader=registry.build_data_spec(train_loader),
        eval_dataloader=registry.build_data_spec(eval_loader),
        optimizers=optimizer,
        schedulers=scheduler,
        algorithms=algorithms,
        callbacks=[
            *registry.build_callbacks(config.callbacks),
            guards.SeedEveryStep(config.seed),
            guards.FiniteLoss(config.on_nonfinite_loss, writer),
            writer,
            *([callback.HubExports(writer, config.dist_timeout)] if config.hf_export == "save" else []),
            guards.StopOnSignal(writer),
            startup,
        ],
        loggers=[*registry.build_loggers(config.loggers), run_log],
        max_duration=config.max_duration,
        eval_interval=config.eval_interval,
        eval_subset_num_batches=config.eval_subset_num_batches,
        device_train_microbatch_size=config.device_train_microbatch_size,
        accumulate_train_batch_on_tokens=True,  # the loss is a mean over the masked tokens of the whole batch
        load_path=str(saved or config.load_path or "") or None,
        parallelism_config=registry.parallelism(config.fsdp_config, device),
        ddp_sync_strategy=config.ddp_sync_strategy,
        dist_timeout=config.dist_timeout,
        compile_config=config.compile_config,
    )
    startup.done("trainer")
    samples = streaming.describe(config.train_loader.dataset, train_loader.dataset)
    announce(config, model, parameters, samples, steps_of(config, train_loader), device, precision, trainer.state)
    remember(config, folder)
    if config.eval_first and trainer.state.timestamp.batch == 0:
        trainer.eval()
        startup.done("first evaluation")
    try:
        if not is_trained(trainer.state, len(train_loader)):
            with logging_redirect_tqdm():  # what is said stands above the progress bar
                trainer.fit()
            log.info(f"padding: {padding}")
        elif guards.on_any_rank(not is_evaluated(folder, trainer.state.timestamp.batch.value), trainer.state):
            trainer.eval()  # a kill came after the last checkpoint and before the evaluation that follows it
    except guards.Stopped:
        trainer.close()
        raise
    finally:
        run_log.end_progress()  # before the error that may have ended it is said
    trainer.close()
    conclude(config, parameters, folder, trainer.state.timestamp.batch.value)


def check(config: PretrainConfig) -> None:
    """Raise UserError for values that no run can have, before anything is read or written."""
    from src.publish import callback
    from src.training import registry

    registry.check_choice("on_nonfinite_loss", config.on_nonfinite_loss, ("stop", "skip"))
    clipping = config.algorithms.get("gradient_clipping")
    by_value = isinstance(clipping, dict) and clipping.get("clipping_type") == "value"
    if config.on_nonfinite_loss == "skip" and by_value:  # gradients are clipped before they are looked at
        raise UserError("on_nonfinite_loss=skip cannot see an infinite gradient that algorithms.gradient_clipping has cut to a value; take clipping_type norm")  # fmt: skip
    registry.check_choice("float32_matmul_precision", config.float32_matmul_precision, ("highest", "high", "medium"))
    if config.hf_export is not None:
        registry.check_choice("hf_export", config.hf_export, callback.CHOICES)
    registry.check_times(max_duration=config.max_duration, eval_interval=config.eval_interval,
                         save_interval=config.save_interval, log_interval=config.log_interval)  # fmt: skip
    for name in ("save_num_checkpoints_to_keep", "eval_subset_num_batches"):
        if (value := getattr(config, name)) < 1 and value != -1:
            raise UserError(f"{name} {value} must be at least 1, or -1 for all")
    loaders = ("train_loader", "eval_loader")
    least = {"device_eval_batch_size": 1, "seed": 0, "max_seq_len": 3}
    for loader in loaders:
        least |= {f"{loader}.num_workers": 0, f"{loader}.dataset.seed": 0, f"{loader}.dataset.max_seq_len": 3}
    for name, bound in least.items():
        value = functools.reduce(getattr, name.split("."), config)
        if not bound <= value < 2**32:
            raise UserError(f"{name} {value} must lie between {bound} and {2**32 - 1}")
    if config.activation_checkpointing and config.fsdp_config.get("activation_checkpointing"):
        raise UserError(
            "activation_checkpointing and fsdp_config.activation_checkpointing are the same twice; leave one out"
        )
    for loader in loaders:
        if (own := getattr(config, loader).dataset.tokenizer_name) != config.tokenizer_name:
            raise UserError(f"{loader}.dataset.tokenizer_name {own} is not tokenizer_name {config.tokenizer_name}, and a run has one tokenizer; leave it out")  # fmt: skip
    if config.load_path is not None and config.model.get("pretrained_checkpoint") is not None:
        raise UserError("load_path and model.pretrained_checkpoint both name what to start from; leave one out")
    if config.ddp_sync_strategy is not None:
        registry.check_choice("ddp_sync_strategy", config.ddp_sync_strategy, registry.DDP_SYNC_STRATEGIES)
    if not 0 < config.dist_timeout < math.inf:
        raise UserError(f"dist_timeout {config.dist_timeout} must be a number of seconds above 0")
    registry.check_fsdp(config.fsdp_config)
    registry.check_compile(config.compile_config)


def check_load_path(config: PretrainConfig, model) -> None:
    """Raise UserError for a checkpoint that a run of this model cannot go on from; one behind a URL is Composer's to read."""
    from src.checkpoints.reading import read_checkpoint
    from src.training import checkpointing, registry

    if "://" in config.load_path:
        return
    path = Path(config.load_path)
    if not path.is_file():
        raise UserError(f"load_path: {path} is not a file; name a checkpoint, or leave it out")
    if not checkpointing.is_whole(path):
        raise UserError(f"load_path: {path} is damaged (cut short?), or no checkpoint; copy it again, or name another")
    checkpoint = read_checkpoint(path)
    own, its = ({name: w.shape for name, w in ws.items()} for ws in (model.model.state_dict(), checkpoint.weights))
    if own != its or checkpoint.published:
        raise UserError(f"load_path: {path} is of another model than this config's; give the config it was trained with, or begin with its weights alone as model.pretrained_checkpoint")  # fmt: skip
    optimizer = registry.build_optimizer(config.optimizer, model)
    groups = checkpoint.optimizers.get(type(optimizer).__qualname__)
    if groups is None or optimizer_settings(groups) != optimizer_settings(optimizer.param_groups):
        raise UserError(f"load_path: {path} was trained with another optimizer than this config's, which would go on; give the config it was trained with, or begin with its weights alone as model.pretrained_checkpoint")  # fmt: skip
    check_end(config, checkpoint, f"load_path: {path}")


def optimizer_settings(groups: list[dict]) -> list[list]:
    """What a checkpoint's optimizer goes on with, whatever the config says."""
    return [[group.get("initial_lr", group["lr"]), list(group["betas"]), group["eps"], group["weight_decay"]] for group in groups]  # fmt: skip


def check_end(config: PretrainConfig, checkpoint, name: str) -> None:
    """Raise UserError for a checkpoint that lies at or after the end of the run."""
    from composer import Time

    end = Time.from_timestring(config.max_duration)
    done = checkpoint.timestamp.get(end.unit.name.lower(), 0)
    if done >= end.value:
        raise UserError(f"{name} is at {done}{end.unit.value}, so max_duration {config.max_duration} leaves nothing to train; set a longer one")  # fmt: skip


def build_model(config: PretrainConfig, tokenizer, saved: Path | None = None):
    """A model with random weights, or with those of `model.pretrained_checkpoint`: its encoder whole, and its head if it has one.

    A run that goes on has its sizes from `saved`, its own checkpoint; what it began with need not be there any more.
    """
    from src.training import registry
    from src.training.model import LionMLM

    section = dict(config.model)
    name = section.pop("pretrained_checkpoint", None)
    if name is None:
        return LionMLM(registry.build_lion_config(section, tokenizer, longest_text(config)), tokenizer)

    from src.checkpoints.pretrained import read_pretrained
    from src.checkpoints.reading import load_all
    from src.data.tokenizers import vocabulary_digest

    name = str(saved or name)
    start = read_pretrained(name, "model.pretrained_checkpoint")
    if start.tokenizer is not None and vocabulary_digest(start.tokenizer) != vocabulary_digest(tokenizer):
        raise UserError(f"tokenizer_name: {config.tokenizer_name} is not the tokenizer of {name}; name that one")
    section = {**registry.lion_arguments(start.config), **section}
    model = LionMLM(registry.build_lion_config(section, tokenizer, longest_text(config)), tokenizer)
    with_head = any(part.startswith("head.") for part in start.weights)
    unread = ("lion.pooler.", "classifier.")  # of models for classification
    weights = {part: tensor for part, tensor in start.weights.items() if not part.startswith(unread)}
    if (embeddings := weights.get("lion.embeddings.word_embeddings.weight")) is not None:
        weights.setdefault("head.decoder.weight", embeddings)  # the same tensor, which a Hub folder holds once
    if not with_head:
        own = model.model.state_dict()
        weights = {**{part: tensor for part, tensor in own.items() if part.startswith("head.")}, **weights}
    load_all(model.model, weights, name)
    log.info(f"weights of {name}{'' if with_head else ', with a new head'}")
    return model


def longest_text(config: PretrainConfig) -> int:
    """In tokens, of training and evaluation."""
    return max(config.train_loader.dataset.max_seq_len, config.eval_loader.dataset.max_seq_len)


# What may differ between the first and the second half of a run: of all keys, and of those of a loader and its streams.
MAY_CHANGE = {
    "max_duration", "eval_interval", "eval_first", "eval_subset_num_batches", "save_interval", "save_num_checkpoints_to_keep",
    "log_interval", "progress_bar", "callbacks", "loggers", "device", "device_train_microbatch_size", "device_eval_batch_size",
    "save_folder", "data_local", "data_remote", "autoresume", "on_nonfinite_loss", "activation_checkpointing", "fsdp_config",
    "ddp_sync_strategy", "dist_timeout", "compile_config", "hf_export",
}  # fmt: skip
LOADER_MAY_CHANGE = {"num_workers", "local", "remote", "predownload", "cache_limit"}


def check_save_folder(config: PretrainConfig, folder: Path) -> None:
    """Refuse a folder that another run's results would be mixed with. Raises UserError."""
    if "://" in config.save_folder:
        raise UserError(f"save_folder: {config.save_folder} is no folder of this machine, where a run has to save; name one, and copy it from there")  # fmt: skip
    check_writable("save_folder", folder)
    before = stored_config(folder)
    if before is None:
        if any(folder.glob("ep*-rank0.pt")):
            raise UserError(f"save_folder: {folder} holds checkpoints but no config.yaml, which tells what run they are of; name another folder, or put it back")  # fmt: skip
        return
    if not config.autoresume:
        raise UserError(
            f"save_folder: {folder} already holds a run; name another folder, or set autoresume=true to go on"
        )
    kept, now = settled(before), settled(to_dict(config))
    changed = {name for name, value in now.items() if kept.get(name) != value}
    changed -= {name for name in changed if "." in name and name.rsplit(".", 1)[-1] in changed}  # a loader's copy of it
    if changed:
        raise UserError(f"save_folder: {folder} holds a run with another {', '.join(sorted(changed))}; name another folder, or go on with the config in {folder / 'config.yaml'}")  # fmt: skip
    if config.max_duration != before["max_duration"]:
        check_shortened(config, folder)


def settled(config: dict) -> dict:
    """Of a config, what a run keeps to its end, by name."""
    kept = {name: value for name, value in config.items() if name not in MAY_CHANGE}
    for loader in ("train_loader", "eval_loader"):
        section = without(LOADER_MAY_CHANGE, kept.pop(loader))
        dataset = section.pop("dataset")
        kept |= {f"{loader}.{name}": value for name, value in section.items()}
        kept |= {f"{loader}.dataset.{name}": value for name, value in dataset.items()}
    return kept


def without(names: set[str], section: Any) -> Any:
    """A section of a config without the keys of these names, at any depth."""
    if not isinstance(section, dict):
        return section
    return {name: without(names, value) for name, value in section.items() if name not in names}


def check_shortened(config: PretrainConfig, folder: Path) -> None:
    """Raise UserError for a max_duration that the run in a folder has reached already."""
    from src.checkpoints.reading import read_checkpoint
    from src.training import checkpointing, registry

    registry.check_times(max_duration=config.max_duration)
    if (saved := checkpointing.newest_whole(folder)) is not None:
        check_end(config, read_checkpoint(saved), f"save_folder: {saved}")


def stored_config(folder: Path) -> dict | None:
    """The config of the run that a folder holds, if it holds one; with the default of a key that is newer than the run."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = folder / "config.yaml"
    if not path.is_file():
        return None
    defaults = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(PretrainConfig)))
    try:
        return OmegaConf.to_container(OmegaConf.merge(defaults, OmegaConf.load(path)), resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError):
        raise UserError(f"save_folder: {path} is damaged; name another folder, or put back what was there") from None


def is_finished(config: PretrainConfig, folder: Path) -> bool:
    """Whether the folder holds this very run, done."""
    return (folder / "summary.json").is_file() and stored_config(folder) == to_dict(config)


def remember(config: PretrainConfig, folder: Path) -> None:
    """Keep the resolved config beside what it makes."""
    from omegaconf import OmegaConf

    if not is_main_process():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").unlink(missing_ok=True)  # of a shorter run that now goes on
        if stored_config(folder) != to_dict(config):
            unfinished = folder / "config.unfinished"
            OmegaConf.save(OmegaConf.create(to_dict(config)), unfinished)
            unfinished.replace(folder / "config.yaml")
    except OSError as error:
        raise UserError(f"save_folder: cannot write to {folder}: {error.strerror or error}; make room there, or name another folder") from None  # fmt: skip


def is_trained(state, steps_in_epoch: int) -> bool:
    """Whether no step is left; a checkpoint of an epoch's last step does not count the epoch yet."""
    from composer import TimeUnit

    now, end = state.timestamp, state.max_duration
    epochs = now.epoch.value + (now.batch_in_epoch.value >= steps_in_epoch)
    return now >= end or (end.unit == TimeUnit.EPOCH and epochs >= end.value)


def is_evaluated(folder: Path, step: int) -> bool:
    """Whether the run's last evaluation is of this step."""
    from src.training.metrics import evaluations

    return any(result["step"] == step for result in evaluations(folder)[-1:])


def announce(config: PretrainConfig, model, parameters: int, samples: str, steps: int, device: str, precision: str, state) -> None:  # fmt: skip
    """Say what is about to be done."""
    log.info(f"{config.run_name}: {model.config.mixer}, {model.config.num_hidden_layers} layers of {model.config.hidden_size}, {parameters:,} parameters, on {device} in {precision}")  # fmt: skip
    log.info(f"data: {samples}, up to {config.max_seq_len} tokens each")
    at_least = "at least " if config.max_duration.endswith("tok") else ""  # texts may be shorter than rows
    log.info(f"{config.max_duration}: {at_least}{steps:,} steps of {config.global_train_batch_size:,} samples, up to {config.global_train_batch_size * config.max_seq_len:,} tokens")  # fmt: skip
    log.info(f"checkpoints, curves and metrics: {config.save_folder}, a checkpoint every {config.save_interval}")
    if state.timestamp.batch.value:
        log.info(f"going on from step {state.timestamp.batch.value}")


def steps_of(config: PretrainConfig, train_loader) -> int:
    """Steps of the whole run; for a duration in tokens, as many as full rows would make."""
    from composer import Time, TimeUnit

    duration = Time.from_timestring(config.max_duration)
    in_a_step = {
        TimeUnit.BATCH: 1,
        TimeUnit.SAMPLE: config.global_train_batch_size,
        TimeUnit.TOKEN: config.global_train_batch_size * config.max_seq_len,
        TimeUnit.EPOCH: 1 / len(train_loader),
    }
    return math.ceil(duration.value / in_a_step[duration.unit])


def conclude(config: PretrainConfig, parameters: int, folder: Path, step: int) -> None:
    """Draw the curves and write the summary. Raises RunFailed where the disk does not take them."""
    if not is_main_process():
        return
    from src.training.metrics import evaluations, read_metrics
    from src.training.run_log import draw_curves

    again = f"make room in {folder}, and the same command does it again"
    if not is_evaluated(folder, step):
        raise RunFailed(f"the run is done and saved, but its last evaluation could not be written; {again}")
    results = evaluations(folder)
    summary = {
        "run": config.run_name,
        "parameters": parameters,
        "seconds": read_metrics(folder)[-1]["seconds"],
        "before": results[0] if results[0]["step"] == 0 else None,
        "best": min(results, key=lambda result: result["loss"]),
        "after": results[-1],
    }
    unfinished = folder / "summary.unfinished"
    try:
        draw_curves([(config.run_name, folder)], folder / "curves.png")
        unfinished.write_text(json.dumps(summary, indent=1))
        unfinished.replace(folder / "summary.json")
    except OSError as error:
        raise RunFailed(
            f"the run is done and saved, but not its summary ({error.strerror or error}); {again}"
        ) from None


def report(folder: Path) -> None:
    """Print what came out of a finished run, and where it lies."""
    summary = json.loads((folder / "summary.json").read_text())
    print(f"\n{'':14}{'loss':>8}{'masked accuracy':>18}{'most frequent token':>22}")
    names = ("before", "after") if summary["best"] == summary["after"] else ("before", "best", "after")
    for name in names:
        if result := summary[name]:
            shown = f"{name}, step {result['step']:,}" if name == "best" else name
            print(f"{shown:14}{result['loss']:8.3f}{result['accuracy']:18.2%}{result['most_frequent_token']:22.2%}")  # fmt: skip
    checkpoint = folder / "latest-rank0.pt"
    print(
        f"\ncheckpoint    {checkpoint}\ncurves        {folder / 'curves.png'}\nmetrics       {folder / 'metrics.jsonl'}"
    )
    print(f"\nnext: python src/hub.py export --checkpoint {checkpoint} --out my-model")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
