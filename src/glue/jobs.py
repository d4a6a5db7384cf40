"""One fine-tuning run, a task with a seed; and all of a config's, one after another, each done once."""

import inspect
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from composer.utils import reproducibility
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy, MulticlassMatthewsCorrCoef
from torchmetrics.regression import SpearmanCorrCoef
from transformers import PreTrainedTokenizerBase

from src import builders, checkpoints
from src.cli import UserError, log
from src.composer_models import LionClassifier
from src.config import FinetuneConfig, to_dict
from src.glue.data import Batches, Example, check_sources, loader, read_task
from src.glue.tasks import Task, select
from src.lion import LionConfig, LionForSequenceClassification
from src.run_log import RunLog

RESULT_FILE = "result.json"


class F1OfClasses(BinaryF1Score):
    """F1 of class 1 from logits of two classes."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        super().update(logits.argmax(-1), labels)


METRICS = {
    "accuracy": lambda classes: MulticlassAccuracy(classes, average="micro"),
    "f1": lambda classes: F1OfClasses(),
    "matthews": lambda classes: MulticlassMatthewsCorrCoef(classes),
    "spearman": lambda classes: SpearmanCorrCoef(),
}


@dataclass
class Start:
    """What every job starts from: sizes, weights of the encoder (None: random ones) and tokenizer."""

    config: dict[str, Any]
    weights: dict[str, Tensor] | None
    tokenizer: PreTrainedTokenizerBase
    name: str


def run_jobs(config: FinetuneConfig) -> list[dict[str, Any]]:
    """Run every task with every seed that has no result yet, and return all results."""
    builders.quiet()
    device = builders.resolve_device(config.device)
    builders.resolve_precision(config.precision, device)
    tasks = select(config.tasks_to_run, config.tasks, config.default_seed)
    check_sources(tasks, config.glue_dir)
    start = read_start(config)
    jobs = [(task, seed) for task in tasks for seed in task.seeds]
    folder = Path(config.save_folder)
    log.info(f"{config.base_run_name}: {len(jobs)} jobs ({', '.join(task.title for task in tasks)}), from {start.name}, on {device}")  # fmt: skip
    log.info(f"scores and predictions: {folder}")
    results, data, begun, trained = [], {}, time.monotonic(), 0
    for number, (task, seed) in enumerate(jobs, 1):
        place = folder / "jobs" / f"{task.name}-{seed}"
        settings = fingerprint(config, task, start)
        result = None if config.rerun else finished(place, settings)
        if result is None:
            if task.name not in data:
                data = {task.name: read_task(task, config.glue_dir)}  # one task's examples at a time
            name = f"[{number}/{len(jobs)}] {task.title} seed {seed}"
            result = run_job(config, name, task, seed, start, *data[task.name], place, device)
            write_whole(place / RESULT_FILE, json.dumps({**result, "settings": settings}, indent=1))
            trained += 1
            minutes = (time.monotonic() - begun) / trained * (len(jobs) - number) / 60
            left = f", about {minutes:.0f} min left" if number < len(jobs) else ""
            log.info(f"{name}: {100 * result['score']:.2f} in {result['seconds']:.0f} s{left}")
        else:
            log.info(f"[{number}/{len(jobs)}] {task.title} seed {seed}: {100 * result['score']:.2f}, done earlier")
        results.append(result)
    return results


def run_job(
    config: FinetuneConfig,
    name: str,
    task: Task,
    seed: int,
    start: Start,
    train: list[Example],
    validation: dict[str, list[Example]],
    folder: Path,
    device: str,
) -> dict[str, Any]:
    """Fine-tune on one task with one seed; returns scores, the majority class's beside them, and where predictions lie."""
    folder.mkdir(parents=True, exist_ok=True)
    reproducibility.seed_all(seed)
    tokenizer = start.tokenizer
    model = LionClassifier(
        build_model(start, task), tokenizer, [METRICS[metric](task.num_labels) for metric in task.metrics]
    )
    batches = Batches(tokenizer, config.max_seq_len, regression=not task.labels)
    eval_loaders = {
        split: loader(examples, batches, config.device_eval_batch_size) for split, examples in validation.items()
    }
    run_log = RunLog(folder, "10ba", name, config.progress_bar)
    trainer = builders.build_trainer(
        model,
        device=device,
        precision=builders.resolve_precision(task.precision or config.precision, device),
        run_name=f"{config.base_run_name}-{task.name}-{seed}",
        seed=seed,
        train_dataloader=loader(train, batches, task.batch_size, shuffle_seed=seed),
        eval_dataloader=[builders.build_evaluator(split, eval_loader) for split, eval_loader in eval_loaders.items()],
        optimizers=builders.build_optimizer(
            {
                "name": task.optimizer,
                "lr": task.lr,
                "weight_decay": task.weight_decay,
                "betas": (0.9, 0.98),
                "eps": 1e-6,
            },
            model,
        ),
        schedulers=builders.build_scheduler(config.scheduler),
        algorithms=builders.build_algorithms(config.algorithms),
        callbacks=builders.build_callbacks(config.callbacks),
        loggers=[*builders.build_loggers(config.loggers), run_log],
        max_duration=f"{task.epochs}ep",
        eval_interval=task.eval_interval,
        save_folder=str(folder) if config.save_finetuned_checkpoints else None,
        save_interval=f"{task.epochs}ep",
        save_overwrite=True,
    )
    trainer.fit()
    scores, majority = {}, {}
    for split, eval_loader in eval_loaders.items():
        logits, labels = predict(trainer.state.model, eval_loader, trainer.state.device)
        with (folder / f"predictions-{split}.jsonl").open("w") as file:
            for row, label in zip(logits.tolist(), labels.tolist()):
                file.write(json.dumps({"logits": row, "label": label}) + "\n")
        scores[split] = score(task, logits, labels)
        majority[split] = score(task, constant_prediction(task, train, len(labels)), labels)
    seconds = trainer.state.timestamp.total_wct.total_seconds()
    trainer.close()
    return {"task": task.name, "title": task.title, "seed": seed, "metrics": list(task.metrics), "scores": scores,
            "score": mean_score(scores), "majority": mean_score(majority), "train_examples": len(train),
            "validation_examples": {split: len(examples) for split, examples in validation.items()},
            "seconds": round(seconds, 1), "start": start.name, "folder": str(folder)}  # fmt: skip


def read_start(config: FinetuneConfig) -> Start:
    """Read the starting checkpoint, or make up a random start. Raises UserError where neither can be."""
    path = config.starting_checkpoint_load_path
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if path is None:
        if config.tokenizer_name is None:
            raise UserError("starting_checkpoint_load_path is not set; name a checkpoint, or set tokenizer_name to start from random weights")  # fmt: skip
        tokenizer = builders.build_tokenizer(config.tokenizer_name, config.max_seq_len)
        return Start(builders.build_lion_config(config.model, tokenizer, config.max_seq_len).to_dict(), None, tokenizer, "random weights")  # fmt: skip
    settings, weights, tokenizer = checkpoints.read_encoder(Path(path))
    if config.tokenizer_name is not None:
        tokenizer = builders.build_tokenizer(config.tokenizer_name, config.max_seq_len)
    if tokenizer is None:
        raise UserError(f"{path} holds no tokenizer; set tokenizer_name")
    # Vocabulary and padding are the checkpoint's, not the tokenizer's, rounded.
    changed = {
        "vocab_size": settings["vocab_size"],
        **{key: settings[key] for key in _lion_keys(settings)},
        **config.model,
    }
    settings = builders.build_lion_config(changed, tokenizer, config.max_seq_len).to_dict()
    if config.from_scratch:
        return Start(settings, None, tokenizer, f"random weights, of the sizes of {path}")
    return Start(settings, weights, tokenizer, str(path))


def _lion_keys(settings: dict[str, Any]) -> list[str]:
    return [name for name in inspect.signature(LionConfig).parameters if name in settings]


def build_model(start: Start, task: Task) -> LionForSequenceClassification:
    """A classifier with the starting encoder: all of it, but for the pooler that pretraining does not have."""
    names = {"id2label": dict(enumerate(task.labels)), "label2id": {label: i for i, label in enumerate(task.labels)}}
    labels = names if task.labels else {"num_labels": 1, "problem_type": "regression"}
    settings = {name: start.config[name] for name in _lion_keys(start.config)}
    model = LionForSequenceClassification(LionConfig(**settings, **labels))
    if start.weights is not None:
        own = model.lion.state_dict()
        fresh = {
            name: tensor for name, tensor in own.items() if name.startswith("pooler.") and name not in start.weights
        }
        checkpoints.load_all(model.lion, {**fresh, **start.weights}, start.name)
    return model


@torch.no_grad()
def predict(model: LionClassifier, eval_loader, device) -> tuple[Tensor, Tensor]:
    """Logits, or predictions of a regression, and labels of a whole split, on the CPU."""
    model.eval()
    logits, labels = [], []
    for batch in eval_loader:
        labels.append(batch["labels"])
        logits.append(model.eval_forward(device.batch_to_device(batch)).cpu())
    return torch.cat(logits), torch.cat(labels)


def score(task: Task, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Each metric of a task over a whole split."""
    values = {}
    for name in task.metrics:
        metric: Metric = METRICS[name](task.num_labels)
        metric.update(logits, labels)
        # A constant correlates with nothing; torchmetrics gives it NaN (Spearman) or not quite 0 (Matthews).
        values[name] = 0.0 if name in ("matthews", "spearman") and is_constant(logits) else float(metric.compute())
    return values


def is_constant(logits: Tensor) -> bool:
    """Whether every example is given the same class, or the same value."""
    predictions = logits.argmax(-1) if logits.ndim == 2 else logits
    return bool((predictions == predictions[0]).all())


def mean_score(scores: dict[str, dict[str, float]]) -> float:
    values = [value for metrics in scores.values() for value in metrics.values()]
    return sum(values) / len(values)


def constant_prediction(task: Task, train: list[Example], length: int) -> Tensor:
    """What always giving the training set's most frequent class (or mean) predicts."""
    labels = torch.tensor([example.label for example in train])
    if not task.labels:
        return labels.mean().expand(length)
    logits = torch.zeros(length, task.num_labels)
    logits[:, int(labels.mode().values)] = 1
    return logits


def fingerprint(config: FinetuneConfig, task: Task, start: Start) -> dict[str, Any]:
    """What a result depends on: if any of it changes, the job runs again."""
    shared = {name: value for name, value in to_dict(config).items() if name in ("max_seq_len", "scheduler", "algorithms", "precision", "glue_dir")}  # fmt: skip
    path = Path(start.name)
    stamp = path.stat().st_mtime if path.exists() else None
    settings = {**shared, "task": asdict(task), "start": start.name, "start_changed": stamp, "model": start.config}
    return json.loads(json.dumps(settings))


def finished(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """A job's result, if it has one that the same settings gave."""
    try:
        result = json.loads((folder / RESULT_FILE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return result if result.get("settings") == settings else None


def write_whole(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)
