"""One fine-tuning run, of one task with one seed: from examples to scores and predictions."""

from typing import Any

import torch
from composer import Evaluator
from composer.core import Precision, get_precision_context
from composer.utils import reproducibility
from torch import Tensor

from src.errors import RunFailed
from src.files import LATEST
from src.glue.batches import Batches, loader
from src.glue.config import FinetuneConfig
from src.glue.examples import read_task, texts_digest
from src.glue.model import LionClassifier
from src.glue.scores import TaskScore, score
from src.glue.start import build_model, read_start
from src.glue.tasks import of_glue
from src.jobs import predictions
from src.jobs.experiment import Job, Result, mean_score
from src.jobs.worker import StepReporter
from src.training import registry
from src.training.run_log import RunLog
from src.training.trainer import build_trainer, resolve_precision


def finetune(config: FinetuneConfig, job: Job, device: str, steps: StepReporter, keep_checkpoint: bool) -> Result:
    """Train and evaluate; return the scores, those of the majority class, and a description of the run."""
    start = read_start(config, None if job.after is None else str(job.after.folder / LATEST))
    data = read_task(job.task, config.glue_dir, config.predict_test)
    task, folder = data.task, job.folder
    reproducibility.seed_all(job.seed)
    metrics = {metric: TaskScore(task, metric) for metric in task.metrics}
    model = LionClassifier(build_model(start, task), start.tokenizer, metrics)
    batches = Batches(start.tokenizer, config.max_seq_len, task.regression)
    train_loader = loader(data.train, batches, task.batch_size, shuffle_seed=job.seed)
    size = config.device_eval_batch_size
    eval_loaders = {split: loader(examples, batches, size) for split, examples in data.validation.items()}
    steps.total = task.epochs * len(train_loader)
    optimizer = {"name": task.optimizer, "lr": task.lr, "weight_decay": task.weight_decay, "betas": (0.9, 0.98)}
    trainer = build_trainer(
        model,
        device=device,
        precision=resolve_precision(task.precision or config.precision, device),
        run_name=f"{config.base_run_name}-{folder.name}",
        seed=job.seed,
        train_dataloader=train_loader,
        eval_dataloader=[
            Evaluator(label=split, dataloader=eval_loader, device_eval_microbatch_size=size)
            for split, eval_loader in eval_loaders.items()
        ],
        optimizers=registry.build_optimizer({**optimizer, "eps": 1e-6}, model),
        schedulers=registry.build_scheduler(config.scheduler),
        algorithms=registry.build_all("algorithms", config.algorithms),
        callbacks=[*registry.build_all("callbacks", config.callbacks), steps],
        loggers=[*registry.build_all("loggers", config.loggers), RunLog(folder, "10ba")],
        max_duration=f"{task.epochs}ep",
        eval_interval=task.eval_interval,
        save_folder=str(folder) if keep_checkpoint else None,
        save_interval=f"{task.epochs}ep",
        save_overwrite=True,
    )
    trainer.fit()
    seconds = trainer.state.timestamp.total_wct.total_seconds()
    scores, majority, train_labels = {}, {}, torch.tensor([example.label for example in data.train])
    constant = train_labels.mean() if task.regression else train_labels.mode().values  # the majority class
    for split, examples in (data.validation | data.test).items():
        state, split_loader = trainer.state, eval_loaders.get(split) or loader(examples, batches, size)
        logits = predict(state.model, split_loader, state.device, state.precision)
        lines = [(example.id, example.label) for example in examples]
        predictions.write(folder / predictions.file_name(split), logits, task.labels, lines)
        if split in data.validation:
            labels = torch.tensor([example.label for example in examples])
            scores[split] = score(task.metrics, predictions.predicted(logits), labels, task.num_labels)
            majority[split] = score(task.metrics, constant.expand(len(labels)), labels, task.num_labels)
    trainer.close()
    return {
        "task": task.name, "title": task.title, "variant": task.variant, "seed": job.seed,
        "metrics": list(task.metrics), "labels": list(task.labels),
        "scores": scores, "score": mean_score(scores), "majority": mean_score(majority),
        "train_examples": len(data.train),
        "validation_examples": {split: len(examples) for split, examples in data.validation.items()},
        "validation_texts": {split: texts_digest(examples) for split, examples in data.validation.items()},
        "glue": of_glue(task), "test_splits": list(data.test), "seconds": round(seconds, 1), "start": start.name,
        "folder": folder.name,
    }  # fmt: skip


@torch.no_grad()
def predict(model: LionClassifier, batches: Any, device: Any, precision: Precision) -> Tensor:
    """Return the logits (or regression values) of a split on the CPU, in the precision of evaluation during training.

    Raises RunFailed if they are non-finite.
    """
    model.eval()
    with get_precision_context(precision):
        logits = torch.cat([model.eval_forward(device.batch_to_device(batch)).cpu() for batch in batches])
    if not logits.isfinite().all():
        raise RunFailed("the trained model's predictions are non-finite; set a smaller lr")
    return logits
