"""What a comparison of models prints and draws: means and standard deviations over the seeds of each model."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from src.tables import markdown, spread

BASE = "bert-tiny"  # training times are relative to its, if it is among the models


def print_comparison(out: Path, runs: Mapping[str, Sequence[str]]) -> None:
    """Write results.md, results.json, curves.png and scores.png from the finished runs of each model below `out`."""
    from src import plots
    from src.mlm.task import CURVES

    models = {model: [read(out, name) for name in names] for model, names in runs.items()}
    seeds = next(iter(models.values()))
    tasks = shared_tasks(models)
    base = mean(run["seconds"] for run in models[BASE]) if BASE in models else None
    lines = [["model", "parameters", "masked accuracy", *tasks, "training time"]]
    for model, results in models.items():
        scores = [spread([run["tasks"][task]["score"] for run in results]) for task in tasks]
        seconds = [run["seconds"] for run in results]
        time = f"{mean(seconds):,.0f} s" if base is None else f"×{mean(seconds) / base:.2f}"
        accuracy = spread([run["accuracy"] for run in results])
        lines.append([model, f"{results[0]['parameters']:,}", f"{accuracy}%", *scores, time])
    majority = (f"{seeds[0]['tasks'][task]['majority']:.2f}" for task in tasks)
    most_frequent = mean(run["most_frequent_token"] for run in seeds)  # a seed also chooses the masks
    lines.append(["*baseline*", "-", f"{most_frequent:.2f}%", *majority, "-"])
    count = len(next(iter(runs.values())))
    deviation = f"Mean ± standard deviation of {count} seeds. " if count > 1 else ""
    about = f"{deviation}Training time is that of pretraining{'' if base is None else f', relative to {BASE}'}."
    about += " *baseline*: always the most frequent token or the majority class."
    table, data, curves, picture = (out / n for n in ("results.md", "results.json", "curves.png", "scores.png"))
    table.write_text(f"{markdown(lines)}\n\n{about}\n")
    data.write_text(json.dumps(models, indent=1) + "\n")
    plots.curves([(model, out / "pretrained" / names[0]) for model, names in runs.items()], CURVES, curves, "")
    measures = {"masked accuracy, %": lambda run: run["accuracy"]}
    measures |= {task: lambda run, task=task: run["tasks"][task]["score"] for task in tasks}
    draw(models, measures | {"seconds of pretraining": lambda run: run["seconds"]}, picture)
    print(f"\n{table.read_text()}\nresults  {table}, {data}, {curves}, {picture}", flush=True)


def read(out: Path, name: str) -> dict[str, Any]:
    """Return what a finished run scored, in percent: masked accuracy and, if it was fine-tuned, its tasks."""
    summary = json.loads((out / "pretrained" / name / "summary.json").read_text())
    report, tasks = out / "finetuned" / name / "report.json", {}
    for row in json.loads(report.read_text())["tasks"] if report.exists() else ():
        title = f"{row['title']}, {row['metrics'][0]}"
        tasks[title] = {"score": 100 * row["mean"], "majority": 100 * row["majority"]}
    after = summary["after"]
    measured = {name: 100 * after[name] for name in ("accuracy", "most_frequent_token")}
    return {"run": name, **measured, "loss": after["loss"], "tasks": tasks} | {
        name: summary[name] for name in ("parameters", "seconds")
    }


def shared_tasks(models: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Return the tasks that every run was fine-tuned on."""
    first, *others = (run["tasks"] for runs in models.values() for run in runs)
    return [task for task in first if all(task in tasks for tasks in others)]


def draw(models: Mapping[str, Sequence[Any]], measures: Mapping[str, Callable[[Any], float]], picture: Path) -> None:
    """Draw a plot for each measure of a run: a row per model, with a dot per seed, mean and deviation."""
    from src import plots

    figure, axes = plots.subplots(columns=len(measures), width=3.5, height=0.3 * len(models) + 1)
    rows = range(len(models))
    for axis, (title, measure) in zip(axes[0], measures.items()):
        for row, (model, runs) in zip(rows, models.items()):
            seeds = [measure(run) for run in runs]
            deviation = stdev(seeds) if len(seeds) > 1 else None
            axis.errorbar(mean(seeds), row, xerr=deviation, fmt="o", color=plots.color(model), capsize=3)
            axis.plot(seeds, [row] * len(seeds), "k.", markersize=3)
        plots.label_axes(axis, title, "", "")
        axis.set_yticks(rows, models if axis is axes[0, 0] else ["" for _ in rows])
        axis.invert_yaxis()
    plots.save(figure, picture)
