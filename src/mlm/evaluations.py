"""Fine-tune copies of a model while it trains, and log the scores of each at its step."""

import contextlib
import json
import shutil
from pathlib import Path
from statistics import mean
from typing import Any

from composer import Logger, State, Time, TimeUnit
from composer.loggers import WandBLogger
from composer.utils import dist

from src.cli import log
from src.data.workers import usable_cores
from src.files import METRICS, read_json_lines, write_json
from src.jobs.experiment import RESULT_FILE
from src.mlm.finetune_eval import SCRIPT, FinetuneEval
from src.publish.background import Worker, hold, run_script
from src.publish.callback import Background, linked
from src.training.epochs import steps_left
from src.training.run_log import RunLog, place
from src.training.task import in_words

HELD, LOG, PLACE = "checkpoint.pt", "log.txt", "place.json"  # HELD is there until its scores are logged
Place = dict[str, float]  # of a line in METRICS


class FinetuneEvaluations(Background):
    """Fine-tune the first checkpoint at or after each interval, in `save_folder/finetune/ep{epoch}-ba{batch}`. What a
    killed run has left unfinished is resumed with it."""

    work = "fine-tuning"

    def __init__(self, writer: Any, settings: FinetuneEval, name: str, run_log: RunLog):
        super().__init__(writer)
        self.settings, self.name, self.run_log = settings, name, run_log
        self.interval = Time.from_timestring(settings.interval)
        self.folder = writer.folder / "finetune"
        self.passed = 0  # intervals at the start of this process, or at the last evaluation

    def intervals(self, state: State) -> int:
        """Return how many intervals have passed."""
        unit, length = self.interval.unit, self.interval.value
        if unit == TimeUnit.DURATION:
            unit, length = state.max_duration.unit, length * state.max_duration.value
        return int(elapsed(state, unit) / length + 1e-9)

    def after_load(self, state: State, logger: Logger) -> None:
        """Delete what belongs to later steps than that at which the run resumes, and resume what is unfinished."""
        if dist.get_global_rank() != 0:
            return
        logged = {line["step"] for line in read_json_lines(self.writer.folder / METRICS) if "finetune" in line}
        for folder in self.folder.glob("ep*-ba*"):
            if not (folder / PLACE).exists():  # killed while it was filled
                shutil.rmtree(folder)
        found = [(path.parent, json.loads(path.read_text())) for path in self.folder.glob(f"*/{PLACE}")]
        for folder, at in sorted(found, key=lambda each: each[1]["step"]):
            at.pop("intervals", None)  # of an earlier version
            if at["step"] > state.timestamp.batch.value:
                shutil.rmtree(folder)
                continue
            if (folder / HELD).exists():
                if at["step"] in logged:  # killed just before it was deleted
                    (folder / HELD).unlink()
                else:
                    self.waiting.append((folder, at))
        self.passed = self.intervals(state)
        if not found and elapsed(state, state.max_duration.unit) >= state.max_duration.value:
            to_do = "raise max_duration, or give its checkpoint to glue.py"
            log.warning(f"finetune_eval has no effect, since the run is already trained; {to_do}")

    def saved(self, state: State) -> None:
        if (passed := self.intervals(state)) <= self.passed:
            return
        checkpoint, _ = linked(self.writer.folder)
        folder = self.folder / checkpoint.name.removesuffix("-rank0.pt")
        at = place(state)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            hold(checkpoint, folder / HELD)
            write_json(folder / PLACE, at)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)  # it takes the space of a checkpoint
            raise
        self.passed = passed
        self.waiting.append((folder, at))
        if self.current is not None and len(self.waiting) > 1:
            waiting = f"{len(self.waiting)} checkpoints wait for fine-tuning, and take disk space"
            log.warning(f"{waiting}; raise finetune_eval.interval")

    eval_before_all = Background.batch_checkpoint  # a run that ends in the evaluation then resumes the fine-tuning

    def close(self, state: State, logger: Logger) -> None:
        super().close(state, logger)
        if dist.get_global_rank() == 0 and self.writer.saved_batch == state.timestamp.batch.value:
            with contextlib.suppress(OSError):
                self.saved(state)  # the checkpoint after a signal

    def init(self, state: State, logger: Logger) -> None:
        super().init(state, logger)
        if not self.aside and self.device() in visible_gpus()[: dist.get_local_world_size()]:
            to_do = "start composer with fewer processes, or set finetune_eval.device"
            log.warning(f"finetune_eval shares GPU {self.device()} with training; {to_do}")

    def device(self) -> str:
        """Return cpu, or a GPU as in CUDA_VISIBLE_DEVICES."""
        return self.settings.device or ("cpu" if self.aside else visible_gpus()[-1])

    def start(self, item: tuple[Path, Place]) -> Worker:
        folder, settings, gpu = item[0], self.settings, self.device()
        on_cpu = gpu == "cpu"
        if not on_cpu:
            environment = {"CUDA_VISIBLE_DEVICES": gpu}
        elif self.aside:  # beside a run on the same CPU: one thread
            environment = {}
        else:
            environment = {"OMP_NUM_THREADS": str(max(1, usable_cores() // 2))}
        arguments = settings.arguments(folder, f"{self.name}-{folder.name}")
        start = f"starting_checkpoint_load_path={json.dumps(str(folder / HELD))}"
        log.info(f"{folder.name}: fine-tuning on {', '.join(settings.tasks)} beside training, log: {folder / LOG}")
        given = {"log": folder / LOG, "environment": environment, "aside": on_cpu}
        return Worker(run_script, SCRIPT, [*arguments, start, f"device={'cpu' if on_cpu else 'gpu'}"], **given)

    def ended(self, item: tuple[Path, Place], failure: str | None) -> None:
        folder, at = item
        scores, failed = read_report(folder)
        if failure:
            why = failed or [line[7:] for line in read_lines(folder / LOG) if line.startswith("error: ")] or [failure]
            log.warning(f"{folder.name}: fine-tuning failed ({'; '.join(why)}), log: {folder / LOG}; the run continues")
        if scores:
            self.run_log.write({**at, "finetune": scores})
            for destination in self.logger.destinations:
                late = isinstance(destination, WandBLogger)  # which drops values of steps before its last
                step = self.state.timestamp.batch.value if late else at["step"]
                destination.log_metrics({**scores, "finetune/step": at["step"]}, step)
            log.info(f"{folder.name}: {in_words(scores)}")
        (folder / HELD).unlink(missing_ok=True)


def elapsed(state: State, unit: TimeUnit) -> int:
    """Return how many of a unit of time have passed. At an epoch's last step, Composer has yet to count the epoch."""
    now = state.timestamp
    last = unit == TimeUnit.EPOCH and now.batch_in_epoch > 0 and steps_left(state.train_dataloader, now) == 0
    return now.get(unit).value + last


def visible_gpus() -> list[str]:
    from src.jobs.pool import devices

    return devices(True, "gpu")


def release(folder: Path) -> None:
    """Delete the checkpoints that a run in a folder holds for evaluations that are no longer wanted."""
    for held in folder.glob(f"finetune/*/{HELD}") if dist.get_global_rank() == 0 else ():
        held.unlink()


def read_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def read_report(folder: Path) -> tuple[dict[str, float], list[str]]:
    """Return each metric of each task that glue.py has a score for, its mean over seeds and validation splits; and
    which jobs failed, and why. Both are empty if it ended before that."""
    if not (folder / "report.json").is_file():
        return {}, []
    report, scores = json.loads((folder / "report.json").read_text()), {}
    for row in report["tasks"]:
        results = [json.loads((folder / "jobs" / job / RESULT_FILE).read_text()) for job in row["folders"].values()]
        splits = [values for result in results for values in result["scores"].values()]
        scores |= {f"finetune/{row['task']}/{metric}": mean(v[metric] for v in splits) for metric in row["metrics"]}
    return scores, report["failed"]
