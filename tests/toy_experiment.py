"""An experiment without GLUE and without training: a job guesses the parity of numbers. In a module, to be pickled."""

from types import SimpleNamespace
from typing import Any

from src.errors import UserError
from src.jobs import predictions, scores
from src.jobs.experiment import Average, Experiment, Job, Result


class ToyExperiment(Experiment):
    command = "toy.py"
    preload = "src.jobs.predictions"
    averages = (
        Average("toy", "Toy average", {"odd": "Odd", "even": "Even"}),
        Average("toy_odd", "Toy average without Even", {"odd": "Odd"}),
    )

    def check_paths(self) -> None:
        pass

    def plan(self, device: str) -> list[Job]:
        tasks = [
            SimpleNamespace(name=name, title=title, variant="", seeds=(1, 2))
            for name, title in self.averages[0].tasks.items()
        ]
        return [
            Job(task, seed, self.folder / "jobs" / f"{task.name}-{seed}", {"seed": seed, "size": self.config.size})
            for task in tasks
            for seed in task.seeds
        ]

    def cost(self, job: Job) -> int:
        return 1

    def run(self, job: Job, device: str, steps: Any) -> Result:
        import torch

        if job.task.name == self.config.failing:
            raise UserError("fails, as it should")
        labels = [float(number % 2) for number in range(self.config.size)]
        logits = torch.nn.functional.one_hot(torch.tensor(labels).long(), 2).float().roll(job.seed - 1, 0)
        predictions.write(job.folder / "predictions-dev.jsonl", logits, ("even", "odd"), list(enumerate(labels)))
        score = scores.score(("accuracy",), predictions.predicted(logits), torch.tensor(labels), 2)
        return {
            "task": job.task.name,
            "title": job.task.title,
            "variant": "",
            "seed": job.seed,
            "folder": job.folder.name,
            "metrics": ["accuracy"],
            "labels": ["even", "odd"],
            "scores": {"dev": score},
            "score": score["accuracy"],
            "majority": 0.5,
            "at_chance": scores.at_chance(score["accuracy"], 0.5, len(labels)),
            "notes": [f"{self.config.size} numbers"],
        }

    def files(self, job: Job, result: Result) -> list[str]:
        return ["predictions-dev.jsonl"]
