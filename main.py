"""Pretrain an encoder as a masked language model:  [composer -n N] main.py yamls/pretrain/lion-s-base.yaml [key=value ...]"""

import json
import math
import sys
from pathlib import Path

from src import cli
from src.cli import UserError, is_main_process, log
from src.config import PretrainConfig, load, to_dict


def main(argv: list[str]) -> None:
    config = load(PretrainConfig, "main.py", argv)  # before the imports of `pretrain`, which take seconds
    folder = Path(config.save_folder)
    check_save_folder(config, folder)
    if is_finished(config, folder):
        log.info(f"{config.run_name} is finished already, with this config")
        report(folder)
    else:
        pretrain(config, folder)
    if config.hf_export is not None and is_main_process():
        from src.hf_export import export_last

        print(f"\nHub folder    {export_last(folder)}")


def pretrain(config: PretrainConfig, folder: Path) -> None:
    """One run, from config to trained checkpoint, curves and metrics in `save_folder`."""
    import torch
    from composer.utils import dist, reproducibility

    from src import builders, hf_export, run_guards, saving, text_data
    from src.run_log import RunLog

    builders.quiet()
    builders.check_choice("on_nonfinite_loss", config.on_nonfinite_loss, ("stop", "skip"))
    if config.hf_export is not None:
        builders.check_choice("hf_export", config.hf_export, hf_export.CHOICES)
    if config.save_num_checkpoints_to_keep == 0 or config.save_num_checkpoints_to_keep < -1:
        raise UserError(f"save_num_checkpoints_to_keep {config.save_num_checkpoints_to_keep} must be at least 1, or -1 to keep all")  # fmt: skip
    builders.check_times(max_duration=config.max_duration, eval_interval=config.eval_interval,
                         save_interval=config.save_interval, log_interval=config.log_interval)  # fmt: skip
    if config.load_path is not None and "://" not in config.load_path and not Path(config.load_path).is_file():
        raise UserError(f"load_path: {config.load_path} is not a file; name a checkpoint, or leave it out")
    device = builders.resolve_device(config.device)
    precision = builders.resolve_precision(config.precision, device)
    device_batch = builders.check_batch_sizes(
        config.global_train_batch_size, config.device_train_microbatch_size, dist.get_world_size()
    )
    torch.set_float32_matmul_precision(config.float32_matmul_precision)
    tokenizer = builders.build_tokenizer(config.tokenizer_name, config.max_seq_len)
    reproducibility.seed_all(config.seed)
    saved = saving.newest_whole(folder)
    model = build_model(config, tokenizer, saved)
    train_loader = text_data.build(config.train_loader, tokenizer, device_batch, train=True)
    eval_loader = text_data.build(config.eval_loader, tokenizer, config.device_eval_batch_size, train=False)
    padding = train_loader.padding
    run_log = RunLog(folder, config.log_interval, config.run_name, config.progress_bar, padding)
    writer = saving.CheckpointWriter(folder, config.save_interval, config.save_num_checkpoints_to_keep)
    trainer = builders.build_trainer(
        model,
        device=device,
        precision=precision,
        run_name=config.run_name,
        seed=config.seed,
        train_dataloader=builders.build_data_spec(train_loader),
        eval_dataloader=builders.build_data_spec(eval_loader),
        optimizers=builders.build_optimizer(config.optimizer, model),
        schedulers=builders.build_scheduler(config.scheduler),
        algorithms=builders.build_algorithms(config.algorithms),
        callbacks=[
            *builders.build_callbacks(config.callbacks),
            run_guards.SeedEveryStep(config.seed),
            run_guards.FiniteLoss(config.on_nonfinite_loss, writer),
            writer,
            *([hf_export.HubExports(writer)] if config.hf_export == "save" else []),
            run_guards.StopOnSignal(writer),
        ],
        loggers=[*builders.build_loggers(config.loggers), run_log],
        max_duration=config.max_duration,
        eval_interval=config.eval_interval,
        eval_subset_num_batches=config.eval_subset_num_batches,
        device_train_microbatch_size=config.device_train_microbatch_size,
        accumulate_train_batch_on_tokens=True,  # the loss is a mean over the masked tokens of the whole batch
        load_path=str(saved or config.load_path or "") or None,
        parallelism_config=builders.parallelism(config.fsdp_config, device),
        compile_config=config.compile_config,
    )
    samples = text_data.describe(config.train_loader.dataset, train_loader.dataset)
    announce(config, model, samples, steps_of(config, train_loader), device, precision, trainer.state)
    remember(config, folder)
    if config.eval_first and trainer.state.timestamp.batch == 0:
        trainer.eval()
    try:
        if trainer.state.timestamp < trainer.state.max_duration:
            trainer.fit()
            log.info(f"padding: {padding}")
    except run_guards.Stopped as stopped:
        trainer.close()
        raise SystemExit(stopped.status) from None
    finally:
        run_log.end_progress()  # before the error that may have ended it is said
    trainer.close()
    conclude(config, model, folder)


def build_model(config: PretrainConfig, tokenizer, saved: Path | None = None):
    """A model with random weights, or with those of `model.pretrained_checkpoint`: its encoder whole, and its head if it has one.

    A run that goes on has its sizes from `saved`, its own checkpoint; what it began with need not be there any more.
    """
    from src import builders
    from src.composer_models import LionMLM

    section = dict(config.model)
    name = section.pop("pretrained_checkpoint", None)
    if name is None:
        return LionMLM(builders.build_lion_config(section, tokenizer, config.max_seq_len), tokenizer)

    from src.checkpoints import load_all
    from src.pretrained import read_pretrained
    from src.token_rows import vocabulary_digest

    name = str(saved or name)
    start = read_pretrained(name, "model.pretrained_checkpoint")
    if start.tokenizer is not None and vocabulary_digest(start.tokenizer) != vocabulary_digest(tokenizer):
        raise UserError(f"tokenizer_name: {config.tokenizer_name} is not the tokenizer of {name}; name that one")
    section = {**builders.lion_arguments(start.config), **section}
    model = LionMLM(builders.build_lion_config(section, tokenizer, config.max_seq_len), tokenizer)
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


# What may differ between the first and the second half of a run.
MAY_CHANGE = {
    "max_duration", "eval_interval", "eval_first", "eval_subset_num_batches", "save_interval", "save_num_checkpoints_to_keep",
    "log_interval", "progress_bar", "callbacks", "loggers", "device", "device_train_microbatch_size", "device_eval_batch_size",
    "save_folder", "data_local", "data_remote", "train_loader", "eval_loader", "load_path", "autoresume", "on_nonfinite_loss",
    "fsdp_config", "compile_config", "hf_export",
}  # fmt: skip


def check_save_folder(config: PretrainConfig, folder: Path) -> None:
    """Refuse a folder that another run's results would be mixed with. Raises UserError."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"save_folder: {folder} is a file; name another folder")
    before = stored_config(folder)
    if before is None:
        return
    if not config.autoresume:
        raise UserError(
            f"save_folder: {folder} already holds a run; name another folder, or set autoresume=true to go on"
        )
    now = to_dict(config)
    changed = sorted(name for name in now if name not in MAY_CHANGE and before.get(name) != now[name])
    if changed:
        raise UserError(f"save_folder: {folder} holds a run with another {', '.join(changed)}; name another folder, or go on with the config in {folder / 'config.yaml'}")  # fmt: skip


def stored_config(folder: Path) -> dict | None:
    """The config of the run that a folder holds, if it holds one."""
    from omegaconf import OmegaConf

    path = folder / "config.yaml"
    return OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None


def is_finished(config: PretrainConfig, folder: Path) -> bool:
    """Whether the folder holds this very run, done."""
    return (folder / "summary.json").is_file() and stored_config(folder) == to_dict(config)


def remember(config: PretrainConfig, folder: Path) -> None:
    """Keep the resolved config beside what it makes."""
    from omegaconf import OmegaConf

    if is_main_process():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").unlink(missing_ok=True)  # of a shorter run that now goes on
        OmegaConf.save(OmegaConf.create(to_dict(config)), folder / "config.yaml")


def announce(config: PretrainConfig, model, samples: str, steps: int, device: str, precision: str, state) -> None:
    """Say what is about to be done."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(f"{config.run_name}: {model.config.mixer}, {model.config.num_hidden_layers} layers of {model.config.hidden_size}, {parameters:,} parameters, on {device} in {precision}")  # fmt: skip
    log.info(f"data: {samples}, up to {config.max_seq_len} tokens each")
    log.info(f"{config.max_duration}: {steps:,} steps of {config.global_train_batch_size:,} samples, up to {config.global_train_batch_size * config.max_seq_len:,} tokens")  # fmt: skip
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


def conclude(config: PretrainConfig, model, folder: Path) -> None:
    """Draw the curves, write the summary and print it."""
    if not is_main_process():
        return
    from src.metrics import evaluations, read_metrics
    from src.run_log import draw_curves

    draw_curves([(config.run_name, folder)], folder / "curves.png")
    results = evaluations(folder)
    summary = {
        "run": config.run_name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": read_metrics(folder)[-1]["seconds"],
        "before": results[0] if results[0]["batch"] == 0 else None,
        "best": min(results, key=lambda result: result["loss"]),
        "after": results[-1],
    }
    unfinished = folder / "summary.unfinished"
    unfinished.write_text(json.dumps(summary, indent=1))
    unfinished.replace(folder / "summary.json")
    report(folder)


def report(folder: Path) -> None:
    """Print what came out of a finished run, and where it lies."""
    summary = json.loads((folder / "summary.json").read_text())
    print(f"\n{'':14}{'loss':>8}{'masked accuracy':>18}{'most frequent token':>22}")
    names = ("before", "after") if summary["best"] == summary["after"] else ("before", "best", "after")
    for name in names:
        if result := summary[name]:
            shown = f"{name}, step {result['batch']:,}" if name == "best" else name
            print(f"{shown:14}{result['loss']:8.3f}{result['masked_accuracy']:18.2%}{result['most_frequent_token']:22.2%}")  # fmt: skip
    checkpoint = folder / "latest-rank0.pt"
    print(
        f"\ncheckpoint    {checkpoint}\ncurves        {folder / 'curves.png'}\nmetrics       {folder / 'metrics.jsonl'}"
    )
    print(f"\nnext: python src/hub.py export --checkpoint {checkpoint} --out my-model")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    cli.run(main)
