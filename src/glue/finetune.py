"""One fine-tuning run, of one task with one seed: its pretrained start, its model and its batches."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from src.checkpoints.reading import load_all, read_pretrained, weights_digest
from src.data.tokenizers import vocabulary_digest
from src.errors import RunFailed, UserError
from src.files import LATEST
from src.glue import tokens
from src.glue.tasks import FinetuneConfig, Task, of_glue
from src.glue.tokens import Kept, Tokens
from src.jobs.experiment import Job, Result
from src.jobs.pool import StepReporter
from src.jobs.training import Classifier, Split, changed_start, loader, train, workers_of
from src.lion import LionConfig, LionForSequenceClassification
from src.training.text_model import build_lion_config, build_tokenizer, lion_arguments, widen_horizons


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
        return {
            "model": lion_arguments(self.config),
            "weights": weights_digest(self.weights),
            "vocabulary": vocabulary_digest(self.tokenizer),
        }


def read_start(config: FinetuneConfig, path: str | None = None, max_seq_len: int | None = None) -> Start:
    """Read `path`, or else the starting checkpoint, or draw random weights, for texts of `max_seq_len` tokens, by
    default the config's. Raises UserError if that fails."""
    max_seq_len = max_seq_len or config.max_seq_len
    name = path or config.starting_checkpoint_load_path
    given = build_tokenizer(config.tokenizer_name, max_seq_len) if config.tokenizer_name else None
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
    settings = build_lion_config({**arguments, **config.model}, tokenizer, max_seq_len)
    return Start(settings.to_dict(), weights, tokenizer, source, stored)


def build_model(start: Start, task: Task) -> LionForSequenceClassification:
    """Return a classifier with the starting encoder's weights; the pooler, absent in pretraining, may be random."""
    names = {"id2label": dict(enumerate(task.labels)), "label2id": {label: i for i, label in enumerate(task.labels)}}
    labels = {"num_labels": 1, "problem_type": "regression"} if task.regression else names
    model = LionForSequenceClassification(LionConfig(**lion_arguments(start.config), **labels))
    if start.weights is not None:
        own = model.lion.state_dict()
        pooler = {name: tensor for name, tensor in own.items() if name.startswith("pooler.")}
        load_all(model.lion, {**pooler, **start.weights}, start.name, start.stored)
        widen_horizons(model.lion, start.stored)
    return model


def collator(tokenizer: PreTrainedTokenizerBase, max_seq_len: int) -> DataCollatorWithPadding:
    """Pad to the longest text of a batch, up to a multiple of 8 if `max_seq_len` is one."""
    return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if max_seq_len % 8 == 0 else None)


def finetune(
    config: FinetuneConfig, job: Job, device: str, steps: StepReporter, keep_checkpoint: bool, kept: Kept
) -> Result:
    """Train and evaluate; return the scores, those of the majority class, and a description of the run."""
    length = job.task.max_seq_len
    start = read_start(config, None if job.after is None else str(job.after.folder / LATEST), length)
    if job.after is None and weights_digest(start.weights) != job.settings["start"]["weights"]:
        raise RunFailed(changed_start(config))
    data = tokens.read(kept, job.task, start.tokenizer, config)
    task, collate, workers = data.task, collator(start.tokenizer, length), workers_of(config, device)

    def split(examples: Tokens, batch_size: int = config.device_eval_batch_size, seed: int | None = None) -> Split:
        return Split(
            loader(examples, collate, batch_size, workers, seed), examples.labels, examples.ids, examples.texts
        )

    result = train(
        config,
        job,
        device,
        steps,
        lambda: Classifier(build_model(start, task), start.tokenizer, use_logits=True),
        split(data.train, task.batch_size, job.seed),
        {name: split(examples) for name, examples in data.validation.items()},
        {name: split(examples) for name, examples in data.test.items()},
        task=task,
        keep_checkpoint=keep_checkpoint,
    )
    notes = [note for note in (data.train.truncation(length),) if note]
    return {**result, "glue": of_glue(task), "test_splits": list(data.test), "start": start.name, "notes": notes}
