"""One run: from a task to a trained checkpoint, curves and metrics in `save_folder`."""

import contextlib
import math
from pathlib import Path

from src.cli import is_main_process, log
from src.files import exclusive_lock
from src.training import run_folder
from src.training.task import Task

SAME_NAME = (  # keys of a config that are arguments of the trainer
    "run_name", "seed", "float32_matmul_precision", "max_duration", "eval_interval", "eval_subset_num_batches",
    "device_train_microbatch_size", "ddp_sync_strategy", "dist_timeout", "compile_config",
)  # fmt: skip


def run(task: Task) -> None:
    """Train, or resume, unless this run is already finished in `save_folder`; then print the results.

    Raises:
        UserError: the config cannot be used, or the folder holds another run.
        RunFailed: the run could not be completed, or its results could not be written.
    """
    config, folder = task.config, Path(task.config.save_folder)
    run_folder.check_save_folder(config, folder)
    with exclusive_lock(folder, task.command) if is_main_process() else contextlib.nullcontext():
        if run_folder.is_finished(config, folder):
            log.info(f"{config.run_name} is already finished with this config")
        else:
            task.check_paths()
            train(task, folder)
        if is_main_process():
            run_folder.print_summary(folder, task.curves)
            if config.hf_export is not None:
                from src.publish.callback import export_last

                print(f"\nHub folder    {export_last(folder)}")


def train(task: Task, folder: Path) -> None:
    """Train until `max_duration`, from the run's latest valid checkpoint if there is one."""
    from composer import TimeUnit
    from composer.utils import dist, reproducibility
    from tqdm.contrib.logging import logging_redirect_tqdm

    from src.publish.callback import HubExports
    from src.training import guards, registry, trainer
    from src.training.checkpointing import CheckpointWriter, check_load_path, latest_valid_checkpoint
    from src.training.run_log import RunLog, Startup

    config = task.config
    startup = Startup()
    device = trainer.resolve_device(config.device)
    trainer.configure_process(device)
    trainer.check_fsdp(config.fsdp_config, device)
    trainer.check_compile(config.compile_config or {})
    precision = trainer.resolve_precision(config.precision, device)
    batch, microbatch = config.global_train_batch_size, config.device_train_microbatch_size
    device_batch = trainer.split_batch_size(batch, microbatch, dist.get_world_size(), device)
    scheduler = registry.build_scheduler(config.scheduler, config.max_duration)
    algorithms = registry.build_all("algorithms", config.algorithms)
    reproducibility.seed_all(config.seed)
    latest = latest_valid_checkpoint(folder)
    model = task.build_model(latest)
    if config.activation_checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = sum(parameter.numel() for parameter in model.parameters())  # before FSDP shards them
    optimizer = registry.build_optimizer(config.optimizer, model)
    if latest is None and config.load_path is not None:
        check_load_path(config.load_path, model.model, optimizer, config.max_duration)
    startup.done("tokenizer and model")
    if dist.get_world_size() > 1:  # before streaming, which initialises NCCL wherever there is a GPU
        dist.initialize_dist(device, config.dist_timeout)
    train_data, eval_data = task.build_loaders(device_batch)
    startup.done("data")
    title = config.run_name if config.progress_bar else ""
    run_log = RunLog(folder, config.log_interval, title, task.curves, task.statistics)
    writer = CheckpointWriter(folder, config.save_interval, config.save_num_checkpoints_to_keep)
    composer_trainer = trainer.build_trainer(
        model,
        **{name: getattr(config, name) for name in SAME_NAME},
        device=device,
        precision=precision,
        train_dataloader=train_data,
        eval_dataloader=eval_data,
        optimizers=optimizer,
        schedulers=scheduler,
        algorithms=algorithms,
        callbacks=[
            *registry.build_all("callbacks", config.callbacks),
            guards.SeedEveryStep(config.seed),
            guards.FiniteLoss(config.on_nonfinite_loss, writer),
            writer,
            *([HubExports(writer, config.dist_timeout)] if config.hf_export == "save" else []),
            guards.StopOnSignal(writer),
            startup,
        ],
        loggers=[*registry.build_all("loggers", config.loggers), run_log],
        accumulate_train_batch_on_tokens=True,  # the loss is a mean over the predictions of the whole batch
        load_path=str(latest or config.load_path or "") or None,
        parallelism_config={"fsdp": dict(config.fsdp_config)} if config.fsdp_config else None,
    )
    state = composer_trainer.state
    startup.done("trainer")
    model_title, data_title = task.describe(model)
    log.info(f"{config.run_name}: {model_title}, {parameters:,} parameters, on {device} in {precision}")
    log.info(f"data: {data_title}, up to {task.max_tokens_per_sample} tokens each")
    steps_per_epoch = len(train_data.dataloader)
    announce(task, state, steps_per_epoch)
    run_folder.save_config(config, folder)
    if config.eval_first and state.timestamp.batch == 0:
        composer_trainer.eval()
        startup.done("first evaluation")
    now, end = state.timestamp, state.max_duration
    epochs = now.epoch.value + (now.batch_in_epoch.value >= steps_per_epoch)  # saved before the last epoch was counted
    trained = now >= end or (end.unit == TimeUnit.EPOCH and epochs >= end.value)
    try:
        if not trained:
            with logging_redirect_tqdm():  # print messages above the progress bar
                composer_trainer.fit()
        elif guards.on_any_rank(not run_folder.is_evaluated(folder, now.batch.value), state):
            composer_trainer.eval()  # killed between the last checkpoint and the evaluation that follows it
    except SystemExit:  # after a signal
        composer_trainer.close()
        raise
    finally:
        run_log.end_progress()  # before the next message, or the error that ended it, is printed
    if task.statistics and not trained:
        log.info(str(task.statistics))
    composer_trainer.close()
    title = f"{config.run_name}: {model_title}; {data_title}"
    run_folder.write_summary(config, task.curves, parameters, folder, state.timestamp.batch.value, title)


def announce(task: Task, state, steps_per_epoch: int) -> None:
    """Log how long the run of a Composer state is and where its results go."""
    config, end, tokens = task.config, state.max_duration, task.max_tokens_per_sample
    batch = config.global_train_batch_size
    per_step = {"ba": 1, "sp": batch, "tok": batch * tokens, "ep": 1 / steps_per_epoch}
    steps = math.ceil(end.value / per_step[end.unit.value])
    at_least = "at least " if end.unit.value == "tok" else ""  # samples may be shorter than the maximum
    log.info(f"{config.max_duration}: {at_least}{steps:,} steps of {batch:,} samples, up to {batch * tokens:,} tokens")
    log.info(f"checkpoints, curves and metrics: {config.save_folder}, a checkpoint every {config.save_interval}")
    if step := state.timestamp.batch.value:
        log.info(f"resuming from step {step}")
