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


@dataclass
class RunFacts:
    """Facts about a run from the files next to its checkpoint; empty without files or if they are of another run."""

    config: dict[str, Any] = field(default_factory=dict)  # config.yaml of main.py
    evaluation: dict[str, Any] | None = None  # the last "eval" line of metrics.jsonl up to the checkpoint
    result: dict[str, Any] | None = None  # result.json of a job of glue.py


@dataclass
class Source:
    """The dataset that shards were converted from; `hub_id` and `subset` are set if it is on the Hub."""

    name: str
    hub_id: str | None = None
    subset: str | None = None


def read_run(checkpoint: "Checkpoint") -> RunFacts:
    """Return the facts from the files next to a checkpoint, if they belong to the same run."""
    folder, name, run = checkpoint.path.parent, checkpoint.run_name, RunFacts()
    if name is None or checkpoint.published:
        return run
    config, result = _read(folder / "config.yaml"), _read(folder / "result.json")
    if config.get("run_name") == name:
        run.config = config
        step = checkpoint.timestamp.get("batch", 0)
        lines = [line for line in read_json_lines(folder / METRICS) if "eval" in line and line["step"] <= step]
        run.evaluation = lines[-1] if lines else None
    if "task" in result and name.endswith(f"-{result.get('folder')}"):
        run.result = result
    return run


def read_scores(path: Path) -> dict[str, Any]:
    """Return a report of glue.py, given report.json or its folder. Raises UserError if it is not one."""
    file = path / "report.json" if path.is_dir() else path
    scores = _read(file)
    if not scores.get("tasks"):
        raise UserError(f"--glue {path}: {file} is not a report of glue.py; give a report.json, or its folder")
    return scores


def is_glue(row: dict[str, Any]) -> bool:
    """Whether a task's examples are GLUE's."""
    return row.get("glue", row["task"] in GLUE)


def missing_seeds(row: dict[str, Any]) -> str:
    """Return "3 of 5 seeds" for a row with missing seeds, else an empty string."""
    return f"{len(row['seeds'])} of {row['of']} seeds" if len(row["seeds"]) < row.get("of", 0) else ""


def read_source(config: dict[str, Any], loader: str) -> Source | None:
    """Return what a loader's shards were converted from, according to split.json, or else the name of their folder."""
    folder = at(config, f"{loader}.dataset.local") or config.get("data_local")
    if not folder:
        return None
    split = at(config, f"{loader}.dataset.split")
    stored = _read(Path(folder, str(split), "split.json")).get("source") or {}
    if dataset := stored.get("dataset"):
        subset = stored.get("data_subset")
        return Source(f"{dataset} ({subset})" if subset else dataset, dataset, subset)
    # A pattern such as corpus/*.txt is only a meaningful name with its folder.
    paths = [Path(pattern) for pattern in stored.get("data_files") or [folder]]
    return Source(", ".join("/".join(path.parts[-2:]) if "*" in path.name else path.name for path in paths))


def at(config: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a config, or None."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _read(path: Path) -> dict[str, Any]:
    """Return the contents of a YAML or JSON file; empty if it cannot be read."""
    try:
        content = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    except (ValueError, yaml.YAMLError, OSError):
        return {}
    return content if isinstance(content, dict) else {}
