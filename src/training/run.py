"""One run: from a task to a trained checkpoint, curves and metrics in `save_folder`."""

import contextlib
import json
import math
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from src.checkpoints.remote import checkpoint_step
from src.cli import is_main_process, log, several, start_log
from src.config import fixed_settings, read_stored, to_dict
from src.errors import RunFailed, UserError, first_line, reason
from src.files import (
    BEST,
    CONFIG,
    LATEST,
    METRICS,
    SUMMARY,
    check_writable,
    exclusive_lock,
    follow,
    read_json_lines,
    write_atomically,
    write_json,
)
from src.training import changes, ranks
from src.training.config import RunConfig
from src.training.ranks import decide
from src.training.task import Curve, Task, best_step, in_words, score_curve

if TYPE_CHECKING:
    from composer import State

    from src.training.uploads import Uploads

SAME_NAME = (  # keys of a config that are arguments of the trainer
    "run_name", "seed", "float32_matmul_precision", "max_duration", "eval_interval", "eval_subset_num_batches",
    "ddp_sync_strategy", "dist_timeout",
)  # fmt: skip


def run(task: Task) -> None:
    """Train or resume unless this run is finished in `save_folder`; print results. Raises UserError, RunFailed."""
    config, folder = task.config, Path(task.config.save_folder)
    start_log(config.log_level)
    if several():  # which then agree on everything below
        from composer.utils import dist

        from src.training.trainer import resolve_device

        dist.initialize_dist(resolve_device(config.device), config.dist_timeout)
    with ranks.end_as_one(config.dist_timeout), contextlib.ExitStack() as stack:
        decide(lambda: check_save_folder(config, folder))  # before anything is written
        ranks.on_rank_0(lambda: stack.enter_context(exclusive_lock(folder, task.command)))
        uploads = open_remote(config, folder) if config.save_remote else None
        config.history = decide(lambda: check_save_folder(config, folder))
        for name, value in decide(lambda: as_begun(config, read_stored(folder / CONFIG, type(config)))).items():
            setattr(config, name, value)
        try:
            if decide(lambda: is_finished(config, folder)):
                log.info(f"{config.run_name} is already finished with this config")
            else:
                decide(task.check_paths)
                train(task, folder, uploads)
        finally:
            failure = finish_uploads(uploads) if config.save_remote else None
        if is_main_process():
            print_summary(folder, task.curves)
            if config.hf_export is not None:
                from src.publish.callback import exported

                last = exported(folder, LATEST)
                print(f"\nHub folder    {last}")
                if config.save_best and follow(folder / BEST).exists() and (best := exported(folder, BEST)) != last:
                    print(f"the best one  {best}")
            if failure:
                raise RunFailed(
                    f"the run is finished and saved in {folder}, but {failure}; repeat the command to retry"
                )


def as_begun(config: RunConfig, stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys whose value leaves the choice to a new run, with what the run whose config is `stored` chose."""
    left = {name for name, value in config.chosen_at_first.items() if getattr(config, name) == value}
    return {} if stored is None else {name: stored[name] for name in left}


def open_remote(config: RunConfig, folder: Path) -> "Uploads | None":
    """Download what `save_remote` has and `folder` lacks; return what uploads the folder, on rank 0. Raises
    UserError."""
    from src.checkpoints.remote import Store
    from src.training.checkpointing import checkpoints, is_valid_checkpoint
    from src.training.uploads import restore

    def opened() -> "Uploads":
        if Path(config.save_remote).resolve() == folder.resolve():
            raise UserError(f"save_remote: {config.save_remote} is save_folder itself; give another, or omit it")
        store = Store(config.save_remote, "save_remote")
        own = next(filter(is_valid_checkpoint, checkpoints(folder)), None)
        return restore(folder, store, -1 if own is None else checkpoint_step(own.name), check)

    def check(stored: Path) -> None:
        check_stored(config, stored, "save_remote", config.save_remote)

    return ranks.on_rank_0(opened)


def finish_uploads(uploads: "Uploads | None") -> str | None:
    """Return None once everything is uploaded, or why it is not. After an error that all ranks raise, all wait, since a
    launcher that sees one end soon kills the others; after Ctrl-C nobody does."""
    error = sys.exc_info()[1]
    if isinstance(error, KeyboardInterrupt):
        return None
    if error is None or isinstance(error, (RunFailed, SystemExit)) or ranks.is_common(error):
        failure = decide(lambda: uploads.finish())
    else:
        failure = None if uploads is None else uploads.finish()
    if failure and error is not None:
        log.warning(f"save_remote: {failure}")
    return failure


def train(task: Task, folder: Path, uploads: "Uploads | None" = None) -> None:
    """Train until `max_duration`, from the run's latest valid checkpoint if there is one."""
    from composer import TimeUnit
    from composer.utils import dist, reproducibility
    from tqdm.contrib.logging import logging_redirect_tqdm

    from src.checkpoints.remote import fetch
    from src.lion import machine
    from src.publish.callback import HubExports
    from src.training import choices, guards, registry, trainer
    from src.training.best import BestCheckpoint
    from src.training.checkpointing import CheckpointWriter, check_load_path, latest_valid_checkpoint, resume_hint
    from src.training.epochs import steps_left
    from src.training.loading import POSITION
    from src.training.loggers import of_run
    from src.training.own_code import import_files
    from src.training.run_log import RunLog, Startup

    config = task.config
    startup = Startup()
    device = trainer.resolve_device(config.device)
    trainer.configure_process(device)
    import_files(config.code_paths)
    chosen = decide(lambda: choices.recall(folder, "ep*-rank0.pt")) if device == "cpu" else {}
    machine.adopt(chosen)
    compilation = trainer.resolve_compilation(config.compile_config, device, config.fsdp_config, task.compiles_well)
    trainer.check_sections(config.fsdp_config, compilation or {}, device)
    precision = trainer.resolve_precision(config.precision, device)
    world_size = dist.get_world_size()
    device_batch = trainer.split_batch_size(config.global_train_batch_size, task.microbatch_size, world_size, device)
    scheduler = registry.build_scheduler(config.scheduler, config.max_duration)
    algorithms = registry.build_all("algorithms", config.algorithms)
    reproducibility.seed_all(config.seed)
    latest = decide(lambda: latest_valid_checkpoint(folder))
    start = latest or (decide(lambda: fetch(config.load_path, "load_path")) if config.load_path else None)
    model = task.build_model(latest)
    if config.activation_checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = sum(parameter.numel() for parameter in model.parameters())  # before FSDP shards them
    optimizer = registry.build_optimizer(config.optimizer, model)
    settings = changes.settings_of(optimizer)
    if latest is None and config.load_path is not None:
        decide(lambda: check_load_path(config, start, model, optimizer))
    startup.done("model")
    train_data, eval_data = task.build_loaders(device_batch)
    startup.done("data")
    title = config.run_name if config.progress_bar else ""
    run_log = RunLog(
        folder, config.log_interval, title, task.curves, task.statistics, task.counts, compilation is not None
    )
    writer = CheckpointWriter(folder, config.save_interval, config.save_num_checkpoints_to_keep, uploads)
    background = [*([HubExports(writer)] if config.hf_export == "save" else []), *task.background(writer, run_log)]
    composer_trainer = trainer.build_trainer(
        model,
        **{name: getattr(config, name) for name in SAME_NAME},
        device_train_microbatch_size=task.microbatch_size,
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
            *task.callbacks(),
            guards.FiniteLoss(config.on_nonfinite_loss, writer),
            writer,
            *([BestCheckpoint(best, writer)] if (best := task.best_curve()) else []),
            *background,
            guards.StopOnSignal(writer),
            startup,
        ],
        loggers=[*of_run(registry.build_all("loggers", config.loggers), folder, latest is not None), run_log],
        accumulate_train_batch_on_tokens=True,  # the loss is a mean over the predictions of the whole batch
        load_path=None if start is None else str(start),
        load_ignore_keys=None if latest or config.load_position else list(POSITION),
        compile_config=compilation,
        parallelism_config={"fsdp": dict(config.fsdp_config)} if config.fsdp_config else None,
    )
    composer_trainer.logger.log_hyperparameters(to_dict(config))
    state = composer_trainer.state
    if latest is None:
        writer.owes_evaluation = False  # that of another run's checkpoint, load_path
    else:
        writer.saved_batch = state.timestamp.batch.value  # an evaluation that is repeated does not save it again
    step = state.timestamp.batch.value
    new = [each["changed"] for each in config.history if each["step"] >= step] if latest else []
    # A schedule of another max_duration begins after the next step, as always.
    if any({*changed} != {"max_duration"} for changed in new) or not (latest or config.load_position):
        changes.take_effect(state, settings)
    for changed in new:
        run_log.changed(state, changed)
    startup.done("trainer")
    model_title, data_title = task.describe(model)
    log.info(f"{config.run_name}: {model_title}, {parameters:,} parameters, on {device} in {precision}")
    log.info(f"data: {data_title}, {task.sample}")
    report_length(task, state)
    places = f"{config.save_folder}{f' and {config.save_remote}' if config.save_remote else ''}"
    log.info(f"checkpoints, curves and metrics: {places}, a checkpoint every {config.save_interval}")
    if compilation is not None:
        log.info("torch.compile compiles the model in the first steps; compile_config=null starts at once")
    if step:
        log.info(f"resuming from step {step}")
    elif start is not None:
        log.info(f"starting with the weights and the optimizer state of {config.load_path}")
    decide(lambda: save_config(config, folder))
    if chosen and is_main_process():
        choices.keep(chosen, folder)
    now, end = state.timestamp, state.max_duration
    epochs = now.epoch.value + (steps_left(train_data.dataloader, now) == 0)  # saved before the last epoch was counted
    trained = now >= end or (end.unit == TimeUnit.EPOCH and epochs >= end.value)
    try:
        if config.eval_first and step == 0:
            composer_trainer.eval()
            startup.done("first evaluation")
        elif latest is not None and writer.owes_evaluation:
            if decide(lambda: not is_evaluated(folder, step)) or follow_evaluations(config.callbacks):
                composer_trainer.eval()
                startup.done("evaluation")
            writer.owes_evaluation = False
            for each in background:  # what would have begun after that evaluation
                each.batch_checkpoint(state, composer_trainer.logger)
            trained = trained or state.timestamp >= state.max_duration  # the evaluation may have stopped the run
        if not trained:
            with logging_redirect_tqdm():  # print messages above the progress bar
                composer_trainer.fit()
            if state.timestamp < end:  # a callback has called State.stop_training
                log.info(f"a callback, such as early_stopper, ended the run at step {state.timestamp.batch.value:,}")
        elif decide(lambda: not is_evaluated(folder, step)):
            composer_trainer.eval()  # killed between the last checkpoint and the evaluation that follows it
    except SystemExit:  # after a signal
        composer_trainer.close()
        raise
    except RuntimeError as error:
        if compilation is None or not is_of_compiler(error):
            raise
        if signum := next(x.requested for x in composer_trainer.state.callbacks if isinstance(x, guards.StopOnSignal)):
            log.info(f"interrupted while the model was compiled; {resume_hint(folder)}")
            raise SystemExit(128 + signum) from None  # the compiler's own processes were signalled too
        cause = first_line(getattr(error, "inner_exception", error))
        problem = f"torch.compile cannot compile this model: {cause}"
        raise UserError(f"compile_config: {problem}; set compile_config=null to train without") from error
    finally:
        if run_log.bar is not None:  # before the next message, or the error that ended it, is printed
            run_log.bar.close()
    if task.statistics and not trained:
        log.info(str(task.statistics))
    if left := [each.work for each in background if each.is_busy()]:
        log.info(f"the run is trained and saved; waiting for: {', '.join(left)}")
    while guards.on_any_rank(sum(each.is_busy() for each in background), state):  # no rank may wait for long
        time.sleep(0.2)
    composer_trainer.close()
    if is_main_process():
        write_summary(task, folder, state.timestamp.batch.value, parameters, f"{model_title}; {data_title}")


def report_length(task: Task, state: "State") -> None:
    """Log how many steps the run has, and warn of a warm-up that takes all of them."""
    from composer import Time

    config, end, dataset = task.config, state.max_duration, state.train_dataloader.dataset
    batch = config.global_train_batch_size
    tokens = batch * task.max_tokens_per_sample
    steps_per_epoch = len(state.train_dataloader) if hasattr(dataset, "__len__") else math.inf  # of a Hub dataset
    per_step = {"ba": 1, "sp": batch, "tok": tokens, "ep": 1 / steps_per_epoch}
    steps = end.value / per_step[end.unit.value]
    at_least = "at least " if end.unit.value == "tok" else ""  # samples may be shorter than the maximum
    total = f"{at_least}{math.ceil(steps):,} steps of {batch:,} samples"
    log.info(f"{config.max_duration}: {total}, up to {tokens:,} tokens per step")
    is_own = ":" in str(config.scheduler.get("name"))  # a schedule of the user's, whose arguments may mean anything
    warmup = Time.from_timestring("0ba" if is_own else config.scheduler.get("t_warmup") or "0ba")
    if 0 < steps * {**per_step, "dur": 1 / steps}[warmup.unit.value] <= warmup.value:
        problem = "is no shorter than the run, so the learning rate never reaches optimizer.lr"
        log.warning(f"scheduler.t_warmup={config.scheduler['t_warmup']} {problem}; shorten it")


def follow_evaluations(callbacks: Mapping[str, Any]) -> bool:
    """Whether callbacks may keep what evaluations found, which a checkpoint from before an evaluation lacks."""
    return any(name == "early_stopper" or ":" in name for name, given in callbacks.items() if given is not False)


def is_of_compiler(error: RuntimeError) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def is_finished(config: RunConfig, folder: Path) -> bool:
    """Return whether the run in a folder has ended, with the same config but for what is printed."""
    stored, now = read_stored(folder / CONFIG, type(config)) or {}, to_dict(config)
    printed = {name: now[name] for name in ("log_level", "progress_bar")}
    return (folder / SUMMARY).is_file() and {**stored, **printed} == now


def check_save_folder(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    """Return the run's history. Raises UserError for a folder in which its results would mix with another's."""
    check_writable("save_folder", folder)
    return check_stored(config, folder, "save_folder", str(folder))


def check_stored(config: RunConfig, folder: Path, key: str, shown: str) -> list[dict[str, Any]]:
    """Return the history of the run whose files are in a folder, with what `resume_with` changes now. Raises UserError,
    naming the key that holds the address `shown`, if it is another run."""
    stored = read_stored(folder / CONFIG, type(config))
    if stored is None:
        if any(folder.glob("ep*-rank0.pt")):
            raise UserError(f"{key}: {shown} has checkpoints but no {CONFIG}; restore it or choose another")
        return []
    if not config.autoresume:
        raise UserError(f"{key}: {shown} already holds a run; choose another or set autoresume=true")
    now = to_dict(config) | as_begun(config, stored)
    found = changes.found(stored, now, [*config.resume_with, "max_duration"])
    begun = changes.made(stored, now, found)
    old, new = (fixed_settings(settings, type(config)) for settings in (begun, now))
    changed = {name for name, value in new.items() if old.get(name) != value}
    # A key is named once, without its copies in the loaders.
    if names := sorted(name for name in changed if "." not in name or name.rsplit(".", 1)[-1] not in changed):
        keys = changes.found(begun, now, names)
        shortest = sorted(key for key in keys if not any(key.startswith(f"{other}.") for other in keys))
        differs = f"{shown} holds a run that differs in {', '.join(shortest)}"
        to_do = f"choose another folder, or resume with its {CONFIG}"
        if keys and all(map(changes.may_change, keys)):
            to_do += f"; to change them on purpose, set resume_with=[{','.join([*config.resume_with, *keys])}]"
        raise UserError(f"{key}: {differs}; {to_do}")
    step = max((checkpoint_step(path.name) or 0 for path in folder.glob("ep*-rank0.pt")), default=0)
    history = [*stored["history"], *([{"step": step, "changed": found}] if found else [])]
    if found:
        from src.checkpoints.reading import read_checkpoint
        from src.training.checkpointing import check_remaining, latest_valid_checkpoint

        if (latest := latest_valid_checkpoint(folder)) is not None:
            check_remaining(read_checkpoint(latest), config.max_duration, f"{key}: {latest}")
    return history


def save_config(config: RunConfig, folder: Path) -> None:
    """Store the resolved config next to the results."""
    try:
        (folder / SUMMARY).unlink(missing_ok=True)  # of a shorter run that is now extended
        if read_stored(folder / CONFIG, type(config)) != to_dict(config):
            write_atomically(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(to_dict(config))))
    except OSError as error:
        problem = f"cannot write to {folder}: {reason(error)}"
        raise UserError(f"save_folder: {problem}; free disk space or choose another folder") from None


def is_evaluated(folder: Path, step: int) -> bool:
    """Return whether the run's last evaluation was at this step."""
    return [line["step"] for line in read_json_lines(folder / METRICS) if "eval" in line][-1:] == [step]


def write_summary(task: Task, folder: Path, step: int, parameters: int, title: str) -> None:
    """Draw the curves with a title and write the summary. Raises RunFailed if they cannot be written."""
    from src import plots

    name, curves, lines = task.config.run_name, task.curves, read_json_lines(folder / METRICS)
    retry = f"free disk space for {folder} and repeat the command"
    if not is_evaluated(folder, step):
        raise RunFailed(f"the run is finished and saved, but its last evaluation could not be written; {retry}")
    evaluations = [(line["step"], line["eval"]) for line in lines if "eval" in line]
    if lacking := [curve.title for curve in curves for _, values in evaluations if curve.eval_key not in values]:
        problem = f"the run is finished and saved, but an evaluation has no {lacking[0]}, since nothing counted in it"
        raise UserError(f"{problem} (with a masked language model, no token was masked); evaluate on more data")
    results = [{"step": at, **{curve.name: values[curve.eval_key] for curve in curves}} for at, values in evaluations]
    before = results[0] if results[0]["step"] == 0 else None
    best = min(results, key=lambda result: (not math.isfinite(loss := result[curves[0].name]), loss))
    kept = {"best_by": curves[0].title}
    if (curve := task.best_curve()) and (best_at := best_step(evaluations, curve)) is not None:
        best = next(result for result in results if result["step"] == best_at)
        kept["best_by"] = curve.title
        if checkpoint_step(follow(folder / BEST).resolve().name) == best_at:
            kept["best_checkpoint"] = BEST
    summary = {"run": name, "parameters": parameters, "seconds": max(line["seconds"] for line in lines)}
    summary |= {"before": before, "best": best, "after": results[-1], **kept}
    if finetuned := [{"step": line["step"], **line["finetune"]} for line in lines if "finetune" in line]:
        summary["finetuned"] = finetuned
    scores = dict.fromkeys(score for each in finetuned for score in each if score != "step")
    try:
        drawn = (*curves, *map(score_curve, scores))
        plots.curves([(name, folder)], drawn, folder / "curves.png", f"{name}: {title}")
        write_json(folder / SUMMARY, summary)
    except OSError as error:
        raise RunFailed(f"the run is finished and saved, but its summary is not ({reason(error)}); {retry}") from None


def print_summary(folder: Path, curves: tuple[Curve, ...]) -> None:
    """Print the results of a finished run and where they are."""
    path = folder / SUMMARY
    try:
        summary = json.loads(path.read_text())
        results = {name: summary[name] for name in ("before", "best", "after")}
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{path} is corrupt; delete it and repeat the command, which writes it again") from None
    widths = {curve: max(8, len(curve.title) + 3) for curve in curves}
    by = f" {summary['best_by']}" if "best_by" in summary else ""  # which earlier versions did not write
    best = f"best{by}, step {results['best']['step']:,}"
    first = max(14, len(best) + 1)
    print(f"\n{'':{first}}{''.join(curve.title.rjust(width) for curve, width in widths.items())}")
    for name, result in results.items():
        if result and not (name == "best" and result == results["after"]):
            values = (f"{result[c.name]:{width}{'.2%' if c.percent else '.3f'}}" for c, width in widths.items())
            print(f"{best if name == 'best' else name:{first}}{''.join(values)}")
    if finetuned := summary.get("finetuned"):
        step = finetuned[-1].pop("step")
        print(f"\nfine-tuned    {in_words(finetuned[-1])}, from step {step:,}")
    checkpoint = folder / LATEST
    print(f"\ncheckpoint    {checkpoint}")
    if best := summary.get("best_checkpoint"):
        checkpoint = folder / best
        print(f"the best one  {checkpoint}")
    print(f"curves        {folder / 'curves.png'}\nmetrics       {folder / METRICS}")
    print(f"\nnext: python src/hub.py export --checkpoint {shlex.quote(str(checkpoint))} --out my-model")
