"""One training run, of one task with one seed: its batches, training, predictions and scores."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer import Evaluator, State
from composer.core import DataSpec, Precision, get_precision_context
from composer.models import ComposerModel
from composer.utils import reproducibility
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from src.cli import log
from src.config import to_dict
from src.errors import RunFailed
from src.jobs import predictions
from src.jobs.config import JobsConfig
from src.jobs.experiment import Job, Result, mean_score
from src.jobs.pool import StepReporter
from src.jobs.scores import TaskScore, at_chance, score
from src.jobs.tasks import Task, optimizer_of
from src.training import registry
from src.training.averages import EMA
from src.training.checkpointing import CheckpointWriter, latest_valid_checkpoint
from src.training.loggers import of_run
from src.training.own_code import import_files
from src.training.run_log import RunLog
from src.training.trainer import AutocastModel, build_trainer


class GroupedByLength(Sampler[int]):
    """Draw a new order in each epoch, with texts of similar length in each batch to reduce padding. Chunks of up to 50
    batches, at most a quarter of the epoch, are sorted by length; then full batches are shuffled."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        self.lengths, self.batch_size = lengths, batch_size
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        size, order = self.batch_size, torch.randperm(len(self), generator=self.generator).tolist()
        full = len(order) // size * size
        chunk = size * max(1, min(50, len(order) // (4 * size)))
        batches = []
        for start in range(0, full, chunk):
            near = sorted(order[start : min(start + chunk, full)], key=self.lengths.__getitem__)
            batches += [near[at : at + size] for at in range(0, len(near), size)]
        for number in torch.randperm(len(batches), generator=self.generator).tolist():
            yield from batches[number]
        yield from order[full:]


def loader(
    examples: Dataset, collate: Callable, batch_size: int, workers: int = 0, shuffle_seed: int | None = None
) -> DataLoader:
    """Return a loader of all examples; with a seed, their order is new in each epoch, grouped by the `lengths` of the
    examples, a list."""
    shuffled = shuffle_seed is not None
    return DataLoader(
        examples,
        batch_size=batch_size,
        sampler=GroupedByLength(examples.lengths, batch_size, shuffle_seed) if shuffled else None,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        # An epoch takes a random number, unless its workers persist, from the generator that a CPU, though no GPU,
        # draws dropout from: a CPU's results would depend on the number of workers.
        persistent_workers=workers > 0 and torch.cuda.is_available(),
    )


def workers_of(config: JobsConfig, device: str) -> int:
    """Return how many processes prepare a loader's batches: by default none on a CPU, whose cores all compute."""
    return config.num_workers if config.num_workers is not None else 2 * (device == "gpu")


def changed_start(config: JobsConfig) -> str:
    """Return the error of a job that would start from other weights than the command has planned."""
    changed = f"{config.starting_checkpoint_load_path} has changed since the command started"
    return f"{changed}; run it again once the checkpoint is final"


class Classifier(AutocastModel):
    """A transformers model whose evaluations give logits."""

    def eval_forward(self, batch: Mapping[str, Tensor], outputs: Any = None) -> Tensor:
        """Return logits, (batch, classes), or regression values, (batch,)."""
        with self.autocast():
            return super().eval_forward({"labels": None, **batch}, outputs).float()  # a test set has no labels


def count_tokens(batch: Mapping[str, Tensor]) -> int:
    """Return how many tokens, or pixels, a batch has without padding; 0 of what has neither."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    return batch["input_ids"].numel() if "input_ids" in batch else 0


class PassingWriter(CheckpointWriter):
    """Writes checkpoints that a job can do without."""

    def save(self, state: State) -> str | None:
        try:
            return super().save(state)
        except RunFailed as error:
            log.warning(f"{error}; this job is not saved any more, and starts over if it is killed")
            self.is_due = lambda state, event: False
            return None


@dataclass(frozen=True)
class Split:
    """Examples to train on or to predict, in the order of `ids` and `labels` unless it is for training."""

    loader: DataLoader
    labels: Tensor | None  # class numbers or values, (examples,); None: a test set without labels
    ids: Sequence[int | str] = ()  # for the lines of predictions
    digest: str | None = None  # of the inputs, so that runs are only compared on the same examples


def train(
    config: JobsConfig,
    job: Job,
    device: str,
    steps: StepReporter,
    build_model: Callable[[], ComposerModel],
    training: Split,
    validation: Mapping[str, Split],
    test: Mapping[str, Split] | None = None,
    *,
    task: Task | None = None,
    keep_checkpoint: bool = False,
    build_optimizer: Callable[[ComposerModel], torch.optim.Optimizer] | None = None,
) -> Result:
    """Train a model, predict its splits and score them; return what `Experiment.run` has to, without the averages'
    keys.

    Args:
        build_model: called with all generators seeded. The model's `eval_forward(batch)` returns logits, (batch,
            classes), in float32, of batches with or without labels, and its `update_metric` takes them.
        validation: by name, the splits to evaluate on during training.
        test: by name, splits to predict after training. If they have labels, the score is theirs, and that on the
            validation sets is the `selection`, by which the candidates of a search are compared.
        task: the job's, with the labels of its data if it was planned without.
        build_optimizer: default: the task's optimizer, for all parameters alike.
    """
    task, folder, test = task or job.task, job.folder, test or {}
    import_files(config.code_paths)
    reproducibility.seed_all(job.seed)
    model = build_model()
    model.val_metrics = {metric: TaskScore(task, metric) for metric in task.metrics}
    steps.total = task.epochs * len(training.loader)
    evaluators = [
        Evaluator(label=name, dataloader=split.loader, device_eval_microbatch_size=split.loader.batch_size)
        for name, split in validation.items()
    ]
    latest = latest_valid_checkpoint(folder)
    # Saved after evaluations, whose loaders take random numbers, so that a resumed job repeats an uninterrupted one.
    kind = CheckpointWriter if keep_checkpoint else PassingWriter
    writer = kind(folder, config.save_interval, 1, at_end=keep_checkpoint, after_evaluation=True)
    trainer = build_trainer(
        model,
        device=device,
        precision=job.settings["precision"],
        run_name=f"{config.base_run_name}-{folder.name}",
        seed=job.seed,
        train_dataloader=DataSpec(training.loader, get_num_tokens_in_batch=count_tokens),
        eval_dataloader=evaluators,
        device_train_microbatch_size=task.microbatch_size,
        optimizers=build_optimizer(model) if build_optimizer else registry.build_optimizer(optimizer_of(task), model),
        schedulers=registry.build_scheduler(config.scheduler),
        algorithms=registry.build_all("algorithms", config.algorithms),
        callbacks=[*registry.build_all("callbacks", config.callbacks), steps, writer],
        loggers=[
            *of_run(registry.build_all("loggers", config.loggers), folder, latest is not None),
            RunLog(folder, "10ba"),
        ],
        max_duration=f"{task.epochs}ep",
        eval_interval=task.eval_interval,
        load_path=None if latest is None else str(latest),
    )
    trainer.logger.log_hyperparameters({**to_dict(config), "task": job.settings["task"], "seed": job.seed})
    state = trainer.state
    writer.saved_batch = state.timestamp.batch.value
    if latest is not None:
        log.info(f"resuming from step {state.timestamp.batch.value:,}")
    if not writer.ended and state.timestamp < state.max_duration:
        trainer.fit()
    for averages in (each for each in state.algorithms if isinstance(each, EMA)):
        averages.activate(state)
    seconds = state.timestamp.total_wct.total_seconds()
    scores, majority, best, train_labels = {}, {}, {}, training.labels.float()
    constant = train_labels.mean() if task.regression else train_labels.mode().values  # the majority class
    for name, split in {**validation, **test}.items():
        logits = predict(state.model, split.loader, state.device, state.precision)
        labels = [None] * len(split.ids) if split.labels is None else split.labels.tolist()
        predictions.write(folder / predictions.file_name(name), logits, task.labels, zip(split.ids, labels))
        if split.labels is not None:
            labels = split.labels.float()
            scores[name] = score(task.metrics, predictions.predicted(logits), labels, task.num_labels)
            majority[name] = score(task.metrics, constant.expand(len(labels)), labels, task.num_labels)
            best[name] = labels.unique(return_counts=True)[1].max().item() / len(labels)  # of one answer to all
    trainer.close()
    scored = {name: split for name, split in test.items() if name in scores} or validation
    value, chance = (mean_score(values[name] for name in scored) for values in (scores, majority))
    result = {
        "task": task.name, "title": task.title, "variant": task.variant, "seed": job.seed, "folder": folder.name,
        "metrics": list(task.metrics), "labels": list(task.labels),
        "scores": {name: scores[name] for name in scored}, "score": value, "majority": chance,
        "train_examples": len(training.labels), "seconds": round(seconds, 1),
    }  # fmt: skip
    for kind, splits in {"validation": validation, "test": {} if scored is validation else scored}.items():
        if splits:
            result[f"{kind}_examples"] = {name: len(split.ids) for name, split in splits.items()}
            result[f"{kind}_texts"] = {name: split.digest for name, split in splits.items()}
    if scored.keys() != validation.keys():
        result["selection"] = mean_score(scores[name] for name in validation)
    if task.metrics == ("accuracy",):
        constant_answer = sum(best[name] for name in scored) / len(scored)
        result["at_chance"] = at_chance(value, constant_answer, sum(len(split.ids) for split in scored.values()))
    return result


@torch.no_grad()
def predict(model: ComposerModel, batches: Iterable, device: Any, precision: Precision) -> Tensor:
    """Return the logits (or regression values) of a split on the CPU. Raises RunFailed if they are non-finite."""
    model.eval()
    with get_precision_context(precision):
        logits = torch.cat([model.eval_forward(device.batch_to_device(batch)).cpu() for batch in batches])
    if not logits.isfinite().all():
        raise RunFailed("the trained model's predictions are non-finite; set a smaller lr")
    return logits
