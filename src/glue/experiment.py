"""One fine-tuning run, a task with a seed, in a process of its own: from examples to scores and predictions on disk."""

import json
import os
import shutil
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Evaluator, Logger, State
from composer.core import Precision, get_precision_context
from composer.utils import reproducibility
from torch import Tensor

from src import cli
from src.cli import log
from src.errors import RunFailed, UserError
from src.glue.batches import Batches, loader
from src.glue.config import FinetuneConfig
from src.glue.examples import Example, read_task, texts_digest
from src.glue.scores import TaskScore, mean_score, predicted, score
from src.glue.start import build_model, read_start
from src.glue.tasks import Task, of_glue
from src.memory import keep_freed_memory
from src.training import registry, trainer as trainers
from src.glue.model import LionClassifier
from src.training.run_log import RunLog

RESULT_FILE = "result.json"
LOG_FILE = "log.txt"
CHECKPOINT_FILE = "latest-rank0.pt"  # Composer's name


@dataclass(frozen=True)
class Job:
    """A task with a seed.

    Its result depends on `settings`, and the predictions of the test sets on `test_data` too. `after` is the job whose
    encoder it starts from.
    """

    task: Task
    seed: int
    folder: Path
    settings: dict[str, Any]
    test_data: Any = None  # a digest, where the test sets are to be predicted
    after: "Job | None" = None
    keep_checkpoint: bool = False
    work: int = 0  # see sources.Data

    @property
    def name(self) -> str:
        return f"{self.task.title}{f' {self.task.variant}' if self.task.variant else ''} seed {self.seed}"


class Steps(Callback):
    """Tells the main process the step, twice a second."""

    def __init__(self, connection: Connection, total: int):
        self.connection, self.total, self.told = connection, total, 0.0

    def batch_end(self, state: State, logger: Logger) -> None:
        if time.monotonic() - self.told > 0.5:
            self.told = time.monotonic()
            self.connection.send(("step", state.timestamp.batch.value, self.total))


def run_in_process(config: FinetuneConfig, job: Job, device: str, visible: str | None, threads: int | None, connection: Connection) -> None:  # fmt: skip
    """What a job's process does; what it says goes to log.txt, how it ended through `connection`."""
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    if threads is not None:
        torch.set_num_threads(threads)
    if device == "cpu":
        keep_freed_memory()
    try:
        _log_to(job.folder / LOG_FILE)
        result = run_job(config, job, device, Steps(connection, 0))
        result |= {"settings": job.settings, "test_data": job.test_data}
        write_whole(job.folder / RESULT_FILE, json.dumps(result, indent=1))
    except UserError as error:
        connection.send(("failed", str(error)))
        log.info(f"error: {error}")
        sys.exit(1)
    except Exception as error:
        told = (str(error).strip().splitlines() or ["no message"])[0]
        connection.send(("failed", f"{type(error).__name__}: {told}"))  # first, since the log's disk may be full
        traceback.print_exc()
        sys.exit(1)


def _log_to(path: Path) -> None:
    """Send what this process says to a file, in a folder made anew. Raises RunFailed where the disk refuses."""
    shutil.rmtree(path.parent, ignore_errors=True)
    try:
        path.parent.mkdir(parents=True)
        with path.open("w") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror or error}; mend that") from None
    cli.start_log()


def _end_with(connection: Connection) -> None:
    """End this process when the main one ends, however it does."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)


def run_job(config: FinetuneConfig, job: Job, device: str, steps: Steps) -> dict[str, Any]:
    """Fine-tune on one task with one seed; returns scores, the majority class's beside them, and where predictions lie."""
    trainers.silence_libraries()
    start = read_start(config, None if job.after is None else str(job.after.folder / CHECKPOINT_FILE))
    data = read_task(job.task, config.glue_dir, config.predict_test)
    task, folder = data.task, job.folder
    reproducibility.seed_all(job.seed)
    tokenizer = start.tokenizer
    model = LionClassifier(
        build_model(start, task), tokenizer, {metric: TaskScore(task, metric) for metric in task.metrics}
    )
    batches = Batches(tokenizer, config.max_seq_len, task.regression)
    train_loader = loader(data.train, batches, task.batch_size, shuffle_seed=job.seed)
    eval_loaders = {
        split: loader(examples, batches, config.device_eval_batch_size) for split, examples in data.validation.items()
    }
    steps.total = task.epochs * len(train_loader)
    trainer = trainers.build_trainer(
        model,
        device=device,
        precision=trainers.resolve_precision(task.precision or config.precision, device),
        run_name=f"{config.base_run_name}-{folder.name}",
        seed=job.seed,
        train_dataloader=train_loader,
        eval_dataloader=[Evaluator(label=split, dataloader=eval_loader, device_eval_microbatch_size=eval_loader.batch_size) for split, eval_loader in eval_loaders.items()],
        optimizers=registry.build_optimizer(
            {
                "name": task.optimizer,
                "lr": task.lr,
                "weight_decay": task.weight_decay,
                "betas": (0.9, 0.98),
                "eps": 1e-6,
            },
            model,
        ),
        schedulers=registry.build_scheduler(config.scheduler),
        algorithms=registry.build_all("algorithms", config.algorithms),
        callbacks=[*registry.build_all("callbacks", config.callbacks), steps],
        loggers=[*registry.build_all("loggers", config.loggers), RunLog(folder, "10ba", job.name, show_progress=False)],
        max_duration=f"{task.epochs}ep",
        eval_interval=task.eval_interval,
        save_folder=str(folder) if job.keep_checkpoint else None,
        save_interval=f"{task.epochs}ep",
        save_overwrite=True,
    )
    trainer.fit()
    seconds = trainer.state.timestamp.total_wct.total_seconds()
    scores, majority = {}, {}
    for split, eval_loader in eval_loaders.items():
        logits = predict(trainer.state.model, eval_loader, trainer.state.device, trainer.state.precision)
        examples = data.validation[split]
        write_predictions(folder / f"predictions-{split}.jsonl", task, logits, examples)
        labels = torch.tensor([example.label for example in examples])
        scores[split] = score(task.metrics, predicted(logits), labels, task.num_labels)
        constant = constant_prediction(task, data.train).expand(len(labels))
        majority[split] = score(task.metrics, constant, labels, task.num_labels)
    for split, examples in data.test.items():
        test_loader = loader(examples, batches, config.device_eval_batch_size)
        logits = predict(trainer.state.model, test_loader, trainer.state.device, trainer.state.precision)
        write_predictions(folder / f"predictions-{split}.jsonl", task, logits, examples)
    trainer.close()
    return {"task": task.name, "title": task.title, "variant": task.variant, "seed": job.seed, "metrics": list(task.metrics),
            "labels": list(task.labels), "scores": scores, "score": mean_score(scores), "majority": mean_score(majority),
            "train_examples": len(data.train),
            "validation_examples": {split: len(examples) for split, examples in data.validation.items()},
            "validation_texts": {split: texts_digest(examples) for split, examples in data.validation.items()},
            "glue": of_glue(task), "test_splits": list(data.test), "seconds": round(seconds, 1), "start": start.name, "folder": folder.name}  # fmt: skip


@torch.no_grad()
def predict(model: LionClassifier, eval_loader, device, precision: Precision) -> Tensor:
    """Logits, or predictions of a regression, of a whole split, on the CPU, in the precision that evaluations in training have.

    Raises RunFailed where they are not finite.
    """
    model.eval()
    with get_precision_context(precision):
        logits = torch.cat([model.eval_forward(device.batch_to_device(batch)).cpu() for batch in eval_loader])
    if not logits.isfinite().all():
        raise RunFailed("what the trained model predicts is not finite; set a smaller lr")
    return logits


def write_predictions(path: Path, task: Task, logits: Tensor, examples: list[Example]) -> None:
    """A line an example, in the order of the source: logits (or the value), what they predict, and the label if there is one."""
    with path.open("w", encoding="utf-8") as file:
        for row, guess, example in zip(logits.tolist(), predicted(logits).tolist(), examples):
            line = {"logits": row, "prediction": guess if task.regression else task.labels[guess]}
            if example.label is not None:
                line["label"] = example.label
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def constant_prediction(task: Task, train: list[Example]) -> Tensor:
    """What always giving the training set's most frequent class (or mean) predicts."""
    labels = torch.tensor([example.label for example in train])
    return labels.mean() if task.regression else labels.mode().values


def write_whole(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def read_result(job: Job) -> dict[str, Any]:
    return json.loads((job.folder / RESULT_FILE).read_text())
