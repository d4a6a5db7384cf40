"""One fine-tuning run, of one task with one seed: its pretrained start, its batches, training, scores, predictions."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from composer import Evaluator
from composer.core import Precision, get_precision_context
from composer.utils import reproducibility
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from src.checkpoints.reading import load_all, read_pretrained
from src.config import to_dict
from src.data.tokenizers import vocabulary_digest
from src.errors import RunFailed, UserError
from src.files import LATEST, sha256
from src.glue import tokens
from src.glue.scores import TaskScore, score
from src.glue.tasks import FinetuneConfig, Task, of_glue, optimizer_of
from src.glue.tokens import Kept, Tokens
from src.jobs import predictions
from src.jobs.experiment import Job, Result, mean_score
from src.jobs.pool import StepReporter
from src.lion import LionConfig, LionForSequenceClassification
from src.training import registry
from src.training.own_code import import_files
from src.training.run_log import RunLog
from src.training.text_model import build_lion_config, build_tokenizer, lion_arguments, widen_horizons
from src.training.trainer import AutocastModel, build_trainer


@dataclass
class Start:
    """Model settings, weights of the encoder (None: random), tokenizer, and their source."""

    config: dict[str, Any]
    weights: dict[str, Tensor] | None
    tokenizer: PreTrainedTokenizerBase
    name: str
    stored: LionConfig | None = None  # of the weights

    def digest(self) -> dict[str, Any]:
        """Return what results depend on, whatever its source: model settings, weights and vocabulary."""
        parts = []
        for name, tensor in sorted((self.weights or {}).items()):
            parts += [name.encode(), tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()]
        return {
            "model": lion_arguments(self.config),
            "weights": sha256(parts) if self.weights is not None else "random",
            "vocabulary": vocabulary_digest(self.tokenizer),
        }


def read_start(config: FinetuneConfig, path: str | None = None) -> Start:
    """Read `path`, or else the starting checkpoint, or draw random weights. Raises UserError if that fails."""
    name = path or config.starting_checkpoint_load_path
    given = build_tokenizer(config.tokenizer_name, config.max_seq_len) if config.tokenizer_name else None
    arguments, weights, own, source, stored = {}, None, None, "random weights", None
    if name is not None:
        pretrained = read_pretrained(name, "starting_checkpoint_load_path")
        # The vocabulary size and padding token come from the checkpoint.
        stored, weights = pretrained.config, pretrained.encoder()
        arguments = lion_arguments(stored.to_dict())
        own, source = pretrained.load_tokenizer(), name
        if config.from_scratch and path is None:
            weights, source = None, f"random weights, with the sizes of {name}"
        elif given and own and vocabulary_digest(own) != vocabulary_digest(given):
            raise UserError(f"tokenizer_name={config.tokenizer_name} is not the tokenizer of {name}; omit it")
        if not (given or own):
            raise UserError(f"{name} has no tokenizer; set tokenizer_name")
    tokenizer = given or own
    settings = build_lion_config({**arguments, **config.model}, tokenizer, config.max_seq_len)
    return Start(settings.to_dict(), weights, tokenizer, source, stored)


def build_model(start: Start, task: Task) -> LionForSequenceClassification:
    """Return a classifier with the starting encoder's weights; the pooler, absent in pretraining, may be random."""
    names = {"id2label": dict(enumerate(task.labels)), "label2id": {label: i for i, label in enumerate(task.labels)}}
    labels = {"num_labels": 1, "problem_type": "regression"} if task.regression else names
    model = LionForSequenceClassification(LionConfig(**lion_arguments(start.config), **labels))
    if start.weights is not None:
        own = model.lion.state_dict()
        pooler = {name: tensor for name, tensor in own.items() if name.startswith("pooler.")}
        load_all(model.lion, {**pooler, **start.weights}, start.name)
        widen_horizons(model.lion, start.stored)
    return model


class GroupedByLength(Sampler[int]):
    """Draw a new order in each epoch, with texts of similar length in each batch to reduce padding. Chunks of up to 50
    batches, at most a quarter of the epoch, are sorted by length; then full batches are shuffled."""

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
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


def collator(tokenizer: PreTrainedTokenizerBase, max_seq_len: int) -> DataCollatorWithPadding:
    """Pad to the longest text of a batch, up to a multiple of 8 if `max_seq_len` is one."""
    return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if max_seq_len % 8 == 0 else None)


def loader(
    tokens: Tokens, collate: DataCollatorWithPadding, batch_size: int, workers: int = 0, shuffle_seed: int | None = None
) -> DataLoader:
    """Return a loader of all examples; with a seed, their order is new in each epoch."""
    shuffled = shuffle_seed is not None
    return DataLoader(
        tokens,
        batch_size=batch_size,
        sampler=GroupedByLength(tokens.characters.tolist(), batch_size, shuffle_seed) if shuffled else None,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        # An epoch takes a random number, unless its workers persist, from the generator that a CPU, though no GPU,
        # draws dropout from: a CPU's results would depend on the number of workers.
        persistent_workers=workers > 0 and torch.cuda.is_available(),
    )


class LionClassifier(AutocastModel):
    def eval_forward(self, batch: Mapping[str, Tensor], outputs: Any = None) -> Tensor:
        """Return logits, (batch, classes), or regression values, (batch,)."""
        with self.autocast():
            return super().eval_forward({"labels": None, **batch}, outputs).float()  # a test set has no labels


def finetune(
    config: FinetuneConfig, job: Job, device: str, steps: StepReporter, keep_checkpoint: bool, kept: Kept
) -> Result:
    """Train and evaluate; return the scores, those of the majority class, and a description of the run."""
    start = read_start(config, None if job.after is None else str(job.after.folder / LATEST))
    data = tokens.read(kept, job.task, start.tokenizer, config)
    task, folder = data.task, job.folder
    import_files(config.code_paths)
    reproducibility.seed_all(job.seed)
    model = LionClassifier(build_model(start, task), start.tokenizer, use_logits=True)
    model.val_metrics = {metric: TaskScore(task, metric) for metric in task.metrics}
    collate = collator(start.tokenizer, config.max_seq_len)
    # None on a CPU, whose cores all compute.
    workers = config.num_workers if config.num_workers is not None else 2 * (device == "gpu")
    train_loader = loader(data.train, collate, task.batch_size, workers, shuffle_seed=job.seed)
    steps.total = task.epochs * len(train_loader)
    size = config.device_eval_batch_size
    splits = data.validation | data.test
    loaders = {split: loader(examples, collate, size, workers) for split, examples in splits.items()}
    evaluators = [Evaluator(label=s, dataloader=loaders[s], device_eval_microbatch_size=size) for s in data.validation]
    trainer = build_trainer(
        model,
        device=device,
        precision=job.settings["precision"],
        run_name=f"{config.base_run_name}-{folder.name}",
        seed=job.seed,
        train_dataloader=train_loader,
        eval_dataloader=evaluators,
        optimizers=registry.build_optimizer(optimizer_of(task), model),
        schedulers=registry.build_scheduler(config.scheduler),
        algorithms=registry.build_all("algorithms", config.algorithms),
        callbacks=[*registry.build_all("callbacks", config.callbacks), steps],
        loggers=[*registry.build_all("loggers", config.loggers), RunLog(folder, "10ba")],
        max_duration=f"{task.epochs}ep",
        eval_interval=task.eval_interval,
        save_folder=str(folder) if keep_checkpoint else None,
        save_interval=f"{task.epochs}ep",
    )
    trainer.logger.log_hyperparameters({**to_dict(config), "task": job.settings["task"], "seed": job.seed})
    trainer.fit()
    state, seconds = trainer.state, trainer.state.timestamp.total_wct.total_seconds()
    scores, majority, train_labels = {}, {}, data.train.labels.float()
    constant = train_labels.mean() if task.regression else train_labels.mode().values  # the majority class
    for split, examples in splits.items():
        logits = predict(state.model, loaders[split], state.device, state.precision)
        labels = [None] * len(examples) if examples.labels is None else examples.labels.tolist()
        predictions.write(folder / predictions.file_name(split), logits, task.labels, zip(examples.ids, labels))
        if split in data.validation:
            labels = examples.labels.float()
            scores[split] = score(task.metrics, predictions.predicted(logits), labels, task.num_labels)
            majority[split] = score(task.metrics, constant.expand(len(labels)), labels, task.num_labels)
    trainer.close()
    return {
        "task": task.name, "title": task.title, "variant": task.variant, "seed": job.seed,
        "metrics": list(task.metrics), "labels": list(task.labels),
        "scores": scores, "score": mean_score(scores.values()), "majority": mean_score(majority.values()),
        "train_examples": len(data.train),
        "validation_examples": {split: len(examples) for split, examples in data.validation.items()},
        "validation_texts": {split: examples.texts for split, examples in data.validation.items()},
        "glue": of_glue(task), "test_splits": list(data.test), "seconds": round(seconds, 1), "start": start.name,
        "folder": folder.name,
    }  # fmt: skip


@torch.no_grad()
def predict(model: LionClassifier, batches: Iterable, device: Any, precision: Precision) -> Tensor:
    """Return the logits (or regression values) of a split on the CPU. Raises RunFailed if they are non-finite."""
    model.eval()
    with get_precision_context(precision):
        logits = torch.cat([model.eval_forward(device.batch_to_device(batch)).cpu() for batch in batches])
    if not logits.isfinite().all():
        raise RunFailed("the trained model's predictions are non-finite; set a smaller lr")
    return logits
