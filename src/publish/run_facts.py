"""Facts for a model card from the files of a run. Imports neither torch nor transformers."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from src.errors import UserError
from src.files import METRICS, read_json_lines

if TYPE_CHECKING:
    from src.checkpoints.reading import Checkpoint

GLUE = {"cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"}
Facts = dict[str, Any]


@dataclass
class RunFacts:
    """Facts about a run from the files next to its checkpoint; empty without files or if they are of another run."""

    config: Facts = field(default_factory=dict)  # config.yaml of main.py
    evaluation: Facts = field(default_factory=dict)  # the last "eval" line of metrics.jsonl up to the checkpoint
    result: Facts = field(default_factory=dict)  # result.json of a job of glue.py


def read_run(checkpoint: "Checkpoint") -> RunFacts:
    """Return the facts from the files next to a checkpoint, if they belong to the same run."""
    folder, name, run = checkpoint.path.parent, checkpoint.run_name, RunFacts()
    if name is None or checkpoint.published:
        return run
    config, result = _read(folder / "config.yaml"), _read(folder / "result.json")
    if config.get("run_name") == name:
        step = checkpoint.timestamp.get("batch", 0)
        evaluations = [line for line in read_json_lines(folder / METRICS) if "eval" in line and line["step"] <= step]
        run.config, run.evaluation = config, evaluations[-1] if evaluations else {}
    if "task" in result and name.endswith(f"-{result.get('folder')}"):
        run.result = result
    return run


def read_scores(path: Path) -> Facts:
    """Return a report of glue.py, given report.json or its folder. Raises UserError if it is not one."""
    file = path / "report.json" if path.is_dir() else path
    scores = _read(file)
    if not scores.get("tasks"):
        raise UserError(f"--glue {path}: {file} is not a report of glue.py; give a report.json, or its folder")
    return scores


def is_glue(row: Facts) -> bool:
    """Whether a task's examples are GLUE's."""
    return row.get("glue", row["task"] in GLUE)


def missing_seeds(row: Facts) -> str:
    """Return "3 of 5 seeds" for a row with missing seeds, else an empty string."""
    return f"{len(row['seeds'])} of {row['of']} seeds" if len(row["seeds"]) < row.get("of", 0) else ""


def read_source(config: Facts, loader: str) -> Facts:
    """Return what a loader's shards were converted from, by split.json or else by their folder's name.

    "name" is there if it is known, and "hub_id" and "subset" if it is a dataset on the Hub.
    """
    dataset = at(config, f"{loader}.dataset") or {}
    folder = dataset.get("local") or config.get("data_local")
    if not folder:
        return {}
    stored = _read(Path(folder, str(dataset.get("split")), "split.json")).get("source") or {}
    if hub_id := stored.get("dataset"):
        subset = stored.get("data_subset")
        return {"name": f"{hub_id} ({subset})" if subset else hub_id, "hub_id": hub_id, "subset": subset}
    # A pattern such as corpus/*.txt is only a meaningful name with its folder.
    paths = [Path(pattern) for pattern in stored.get("data_files") or [folder]]
    return {"name": ", ".join("/".join(path.parts[-2:]) if "*" in path.name else path.name for path in paths)}


def at(config: Facts, path: str) -> Any:
    """Return the value at a dotted path of a config, or None."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _read(path: Path) -> Facts:
    """Return the contents of a YAML or JSON file; empty if it cannot be read."""
    try:
        content = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    except (ValueError, yaml.YAMLError, OSError):
        return {}
    return content if isinstance(content, dict) else {}
