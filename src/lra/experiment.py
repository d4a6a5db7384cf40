"""Long Range Arena as an experiment: every task with every seed; the jobs are in training.py."""

from pathlib import Path
from typing import Any

from src.checkpoints.remote import check_exists
from src.cli import log
from src.files import LATEST
from src.jobs import predictions
from src.jobs.experiment import Average, Experiment, Job, Result
from src.lra import sources
from src.lra.arrays import Prepared, prepare
from src.lra.tasks import LRA, SUITE, LraConfig, counts, unlike

TITLES = {name: task.title for name, task in LRA.items()}


class LraExperiment(Experiment):
    command = "lra.py"
    example = "yamls/lra/lion-s.yaml lra_dir=DIR tasks_to_run=[listops]"
    commands = ("report", "make", "shards")
    schema = LraConfig
    preload = "src.lra.training"
    scored_on = "test"
    averages = (
        Average("lra", "LRA average", TITLES),
        Average("lra_without_pathx", "Average without Path-X", {n: t for n, t in TITLES.items() if n != "pathx"}),
    )

    def check_paths(self) -> None:
        config = self.config
        self.tasks = SUITE.select(config.tasks_to_run, config.tasks, config.default_seed, config.seeds)
        check_exists(config.starting_checkpoint_load_path, "starting_checkpoint_load_path")
        for task in self.tasks:
            sources.check(task, config.lra_dir)

    def check_sections(self) -> None:
        super().check_sections()
        self.models()

    def models(self) -> tuple[list[dict[str, Any]], dict | None]:
        """Return the settings of each task's model, and the weights of the starting checkpoint. Raises UserError, also
        for weights that do not fit."""
        from src.lra.training import build_model, build_settings, read_start

        stored, weights = read_start(self.config)
        self.start_name = self.config.starting_checkpoint_load_path or self.start_name
        models = [build_settings(task, self.config, stored) for task in self.tasks]
        for settings in {task.name: settings for task, settings in zip(self.tasks, models)}.values():
            build_model(settings, weights, self.config, stored)
        return models, weights

    def plan(self, device: str) -> list[Job]:
        from src.checkpoints.reading import weights_digest

        super().check_sections()
        config, (models, weights) = self.config, self.models()
        start, jobs = weights_digest(weights), []
        self.prepared: dict[str, Prepared] = {}
        for task, settings in zip(self.tasks, models):
            if task.name not in self.prepared:
                folder = Path(config.arrays_folder or self.folder / "arrays")
                self.prepared[task.name] = prepare(task, config.lra_dir, folder, config.progress_bar)
                log.info(self.prepared[task.name].summary())
                self.prepared[task.name].check_labels(task.num_labels)
            depends = {"data": self.prepared[task.name].digest, "start": start, "model": settings}
            jobs += [self.job(task, seed, device, **depends) for seed in task.seeds]
        return jobs

    def cost(self, job: Job) -> int:
        return job.task.epochs * self.prepared[job.task.name].about["splits"]["train"]["tokens"]

    def run(self, job: Job, device: str, steps: Any) -> Result:
        from src.lra.training import run

        task, prepared = job.task, self.prepared[job.task.name]
        origin, cut = prepared.about["origin"], prepared.about["splits"]["train"]["cut"]
        truncated = f"{cut:.1%} of the training inputs truncated to {task.max_length:,}" if cut else ""
        validated = "validated on the test set" if task.validation == "test" else ""
        notes = [note for note in (origin, truncated, validated) if note]
        result = run(self.config, job, device, steps, prepared)
        tested = prepared.about["splits"]["test"]["examples"]
        notes += unlike(task, tested) or []
        counted = counts(task, origin, tested)
        return {**result, "notes": notes, **{a.key: counted and task.name in a.tasks for a in self.averages}}

    def files(self, job: Job, result: Result) -> list[str]:
        predicted = [predictions.file_name(split) for split in result["scores"]]
        return predicted + [LATEST] * self.config.save_finetuned_checkpoints

    def origin(self, settings: dict[str, Any]) -> Any:
        return settings.get("start")
