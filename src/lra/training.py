"""One job: its model, from random weights or a pretrained encoder, its batches and its training."""

from typing import Any

import torch
from torch import Tensor, nn

from src.checkpoints.adapters import check_trainable
from src.checkpoints.reading import load_all, read_pretrained, weights_digest
from src.errors import RunFailed, UserError
from src.jobs.experiment import Job, Result
from src.jobs.pool import StepReporter
from src.jobs.tasks import optimizer_of
from src.jobs.training import Classifier, Split, changed_start, loader, train, workers_of
from src.lion import LionConfig
from src.lra.arrays import Examples, Prepared, collate
from src.lra.model import SequenceClassifier
from src.lra.tasks import FIRST, LraConfig, Task, model_arguments
from src.training import registry
from src.training.text_model import lion_arguments


def read_start(config: LraConfig) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """Return the arguments of LionConfig and the encoder's weights of the starting checkpoint, or none. Raises
    UserError."""
    if config.starting_checkpoint_load_path is None:
        return {}, None
    pretrained = read_pretrained(config.starting_checkpoint_load_path, "starting_checkpoint_load_path")
    return lion_arguments(pretrained.config.to_dict()), pretrained.encoder()


def build_settings(task: Task, config: LraConfig, stored: dict[str, Any]) -> dict[str, Any]:
    """Return what a task's model is built from: arguments of LionConfig and of the head. Raises UserError."""
    # A checkpoint has sizes: only what the config itself gives overrides them.
    own = (config.tasks.get(task.name) or {}).get("model", {}) if stored else task.model
    arguments = model_arguments(task, own, config.model)
    if stored and task.inputs == "values":
        pretrained = "starting_checkpoint_load_path: a pretrained model reads tokens, but this task reads values"
        raise UserError(f"{pretrained}; set tasks.{task.name}.inputs=tokens")
    rows = -(-(1 if task.inputs == "values" else task.vocabulary + FIRST) // 8) * 8
    if stored and stored["vocab_size"] != rows:
        other = f"starting_checkpoint_load_path: vocab_size={stored['vocab_size']}, but {task.title} needs {rows}"
        raise UserError(f"{other}; use a model that main.py pretrained on the task's own inputs (lra.py shards)")
    start = stored or {"vocab_size": rows, "type_vocab_size": 0, "max_position_embeddings": task.longest}
    fixed = {"classifier_pooling": "mean", "hidden_dropout_prob": task.dropout, "attention_probs_dropout_prob": 0.0}
    try:
        settings = LionConfig(**(start | fixed | arguments))
    except ValueError as error:
        raise UserError(f"tasks.{task.name}.model: {error}") from None
    check_trainable(settings)
    positions = settings.max_position_embeddings
    if settings.has_positions and positions < task.longest:
        raise UserError(
            f"tasks.{task.name}: max_length={task.max_length} exceeds the model's {positions} positions; lower it"
        )
    head = {"num_labels": task.num_labels, "reads_values": task.inputs == "values", "reads_pairs": task.pairs}
    return {**lion_arguments(settings.to_dict()), **head}


def build_model(
    settings: dict[str, Any], weights: dict[str, Tensor] | None, config: LraConfig, stored: dict[str, Any] | None = None
) -> SequenceClassifier:
    """Return a classifier with random weights, or with those of a pretrained encoder, which was `stored` with these
    arguments of LionConfig. Raises UserError."""
    model = SequenceClassifier(LionConfig(**settings))
    if weights is not None:
        source = str(config.starting_checkpoint_load_path)
        load_all(model.lion, weights, source, LionConfig(**stored) if stored else None)
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def build_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Return a task's optimizer. Unless it is the user's own, weight decay exempts decays, biases and norms."""
    exempt = {} if ":" in task.optimizer else {"filter_bias_norm_wd": True}
    return registry.build_optimizer({**optimizer_of(task), **exempt}, model)


def run(config: LraConfig, job: Job, device: str, steps: StepReporter, prepared: Prepared) -> Result:
    """Train and test a job's model."""
    task, workers = job.task, workers_of(config, device)
    stored, weights = read_start(config)
    if weights_digest(weights) != job.settings["start"]:
        raise RunFailed(changed_start(config))

    def split(name: str, batch_size: int = config.device_eval_batch_size, seed: int | None = None) -> Split:
        examples: Examples = prepared.open(name)
        batches = loader(examples, collate, batch_size, workers, seed)
        return Split(
            batches, torch.from_numpy(examples.labels), range(len(examples)), prepared.about["splits"][name]["sha256"]
        )

    test = {"test": split("test")}

    return train(
        config,
        job,
        device,
        steps,
        lambda: Classifier(build_model(job.settings["model"], weights, config, stored), use_logits=True),
        split("train", task.batch_size, job.seed),
        test if task.validation == "test" else {"validation": split("validation")},
        test,
        keep_checkpoint=config.save_finetuned_checkpoints,
        build_optimizer=lambda model: build_optimizer(task, model),
    )
