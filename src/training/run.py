"""One run: from a task to a trained checkpoint, curves and metrics in `save_folder`."""

import contextlib
import math
from pathlib import Path

from src.cli import is_main_process, log
from src.files import exclusive_lock
from src.training import run_folder
from src.training.task import Task


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
    from composer.utils import dist, reproducibility
    from tqdm.contrib.logging import logging_redirect_tqdm

    from src.publish.callback import HubExports
    from src.training import guards, registry, trainer
    from src.training.checkpointing import CheckpointWriter, check_load_path, latest_valid_checkpoint
    from src.training.run_log import RunLog
    from src.training.startup import Startup

    config = task.config
    startup = Startup()
    device = trainer.resolve_device(config.device)
    trainer.configure_process(device)
    trainer.check_fsdp(config.fsdp_config, device)
    trainer.check_compile(config.compile_config)
    precision = trainer.resolve_precision(config.precision, device)
    microbatch = config.device_train_microbatch_size
    device_batch = trainer.split_batch_size(config.global_train_batch_size, microbatch, dist.get_world_size(), device)
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
    run_log = RunLog(folder, config.log_interval, config.run_name, config.progress_bar, task.curves, task.statistics)
    writer = CheckpointWriter(folder, config.save_interval, config.save_num_checkpoints_to_keep)
    composer_trainer = trainer.build_trainer(
        model,
        device=device,
        precision=precision,
        float32_matmul_precision=config.float32_matmul_precision,
        run_name=config.run_name,
        seed=config.seed,
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
        max_duration=config.max_duration,
        eval_interval=config.eval_interval,
        eval_subset_num_batches=config.eval_subset_num_batches,
        device_train_microbatch_size=microbatch,
        accumulate_train_batch_on_tokens=True,  # the loss is a mean over the predictions of the whole batch
        load_path=str(latest or config.load_path or "") or None,
        parallelism_config={"fsdp": dict(config.fsdp_config)} if config.fsdp_config else None,
        ddp_sync_strategy=config.ddp_sync_strategy,
        dist_timeout=config.dist_timeout,
        compile_config=config.compile_config,
    )
    state = composer_trainer.state
    startup.done("trainer")
    steps_per_epoch = len(train_data.dataloader)
    announce(task, model, parameters, device, precision, steps_per_epoch, state.timestamp.batch.value)
    run_folder.save_config(config, folder)
    if config.eval_first and state.timestamp.batch == 0:
        composer_trainer.eval()
        startup.done("first evaluation")
    try:
        if not is_trained(state, steps_per_epoch):
            with logging_redirect_tqdm():  # print messages above the progress bar
                composer_trainer.fit()
            if task.statistics:
                log.info(str(task.statistics))
        elif guards.on_any_rank(not run_folder.is_evaluated(folder, state.timestamp.batch.value), state):
            composer_trainer.eval()  # killed between the last checkpoint and the evaluation that follows it
    except guards.Stopped:
        composer_trainer.close()
        raise
    finally:
        run_log.end_progress()  # before the error that may have ended it is printed
    composer_trainer.close()
    title = f"{config.run_name}: {'; '.join(task.describe(model))}"
    run_folder.write_summary(config, task.curves, parameters, folder, state.timestamp.batch.value, title)


def is_trained(state, steps_per_epoch: int) -> bool:
    """Return whether no step is left; a checkpoint of an epoch's last step does not count that epoch yet."""
    from composer import TimeUnit

    now, end = state.timestamp, state.max_duration
    epochs = now.epoch.value + (now.batch_in_epoch.value >= steps_per_epoch)
    return now >= end or (end.unit == TimeUnit.EPOCH and epochs >= end.value)


def announce(
    task: Task, model, parameters: int, device: str, precision: str, steps_per_epoch: int, resumed_step: int
) -> None:
    """Log what is about to run."""
    config = task.config
    about_model, about_data = task.describe(model)
    batch = config.global_train_batch_size
    log.info(f"{config.run_name}: {about_model}, {parameters:,} parameters, on {device} in {precision}")
    log.info(f"data: {about_data}, up to {task.max_tokens_per_sample} tokens each")
    at_least = "at least " if config.max_duration.endswith("tok") else ""  # samples may be shorter than the maximum
    steps = total_steps(config.max_duration, batch, task.max_tokens_per_sample, steps_per_epoch)
    tokens = batch * task.max_tokens_per_sample
    log.info(f"{config.max_duration}: {at_least}{steps:,} steps of {batch:,} samples, up to {tokens:,} tokens")
    log.info(f"checkpoints, curves and metrics: {config.save_folder}, a checkpoint every {config.save_interval}")
    if resumed_step:
        log.info(f"resuming from step {resumed_step}")


def total_steps(max_duration: str, batch_size: int, tokens_per_sample: int, steps_per_epoch: int) -> int:
    """Return the number of steps of a run; for a duration in tokens, with samples of the maximum length."""
    from composer import Time, TimeUnit

    duration = Time.from_timestring(max_duration)
    per_step = {
        TimeUnit.BATCH: 1,
        TimeUnit.SAMPLE: batch_size,
        TimeUnit.TOKEN: batch_size * tokens_per_sample,
        TimeUnit.EPOCH: 1 / steps_per_epoch,
    }
    return math.ceil(duration.value / per_step[duration.unit])
