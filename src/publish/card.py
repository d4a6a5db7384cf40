"""The README.md of a Hub folder, from the checkpoint and the files next to it. Unknown facts are omitted."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from src.errors import UserError
from src.files import METRICS, read_json_lines
from src.tables import markdown, mean_of

if TYPE_CHECKING:
    from src.checkpoints.reading import Checkpoint

TEMPLATE = Path(__file__).with_name("card_template.md")
GLUE = {"cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"}
Facts = dict[str, Any]


def model_card(checkpoint: "Checkpoint", name: str, scores: Facts | None = None) -> str:
    """Return the card of a checkpoint exported to a folder called `name`. `scores` is a report.json of glue.py."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    from src.publish.spec import EXPORTS

    spec, scores = EXPORTS[checkpoint.class_name], scores or {"tasks": []}
    config, evaluation, result = _read_run(checkpoint)
    train, evaluated = (_source(config, loader) for loader in ("train_loader", "eval_loader"))
    title = " ".join((checkpoint.run_name or name).split())
    results = [_task_result(row, " and ".join(row["metrics"]), row["mean"]) for row in scores["tasks"]]
    job_scores = [(*pair, split) for split, values in result.get("scores", {}).items() for pair in values.items()]
    results += [_task_result(result, *score) for score in job_scores]
    at_checkpoint = evaluation.get("step") == checkpoint.timestamp.get("batch")  # or the text alone has the step
    for key, (label, _, kind) in spec.metrics.items() if evaluated and at_checkpoint else ():
        if kind and (value := evaluation.get("eval", {}).get(key)) is not None:
            data = {"dataset_type": evaluated["hub_id"] or evaluated["name"], "dataset_config": evaluated["subset"]}
            data |= {"dataset_name": evaluated["name"], "dataset_split": evaluated["split"]}
            data |= {"metric_type": kind, "metric_value": value, "metric_name": label}
            results.append({"task_type": spec.pipeline_tag, **data})
    tags = ["sentence-transformers", "feature-extraction"] if spec.library == "sentence-transformers" else []
    dataset = "nyu-mll/glue" if result and is_glue(result) else train.get("hub_id")
    metadata = ModelCardData(
        model_name=title if results else None,
        eval_results=[EvalResult(**each) for each in results] or None,
        license=None if checkpoint.published else "apache-2.0",
        library_name=spec.library,
        pipeline_tag=spec.pipeline_tag if checkpoint.tokenizer or spec.reads == "images" else None,
        tags=["lion", "linear-attention", checkpoint.config.mixer, *tags],
        datasets=[dataset] if dataset else None,
    )
    table = [["split", "metric", "score"], *([split, m, f"{100 * value:.2f}"] for m, value, split in job_scores)]
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        title=title,
        name=name,
        checkpoint=checkpoint,
        options=", ".join(f"{name} {value}" for name, value in checkpoint.config.options().items()),
        # The decoder's weights are the word embeddings and count once.
        parameters=sum(t.numel() for part, t in checkpoint.weights.items() if part != "head.decoder.weight"),
        spec=spec,
        config=config,
        data=train,
        tokenizer=_tokenizer(checkpoint, config.get("tokenizer_name")),
        start=_start(config, result),
        evaluation=evaluation,
        evaluated_on=", ".join(Path(folder).name for folder in config.get("eval_data") or ()),
        masking_rate=evaluated.get("mlm_probability"),
        result=result,
        job_scores=markdown(table) if result else None,
        task_scores=_task_scores(scores),
    )
    return f"{card.content.rstrip()}\n"


def _task_result(row: Facts, metric: str, value: float, split: str | None = None) -> Facts:
    task, title = row["task"], row["title"]
    glue = {"dataset_type": "nyu-mll/glue", "dataset_config": task, "dataset_name": f"GLUE {title}"}
    dataset = glue if is_glue(row) else {"dataset_type": task, "dataset_name": title}
    score = {"metric_type": metric, "metric_value": value, "dataset_split": split}
    return {"task_type": "text-classification", **score, **dataset}


def _task_scores(scores: Facts) -> str | None:
    lines, rows = [["task", "metric", "score", "seeds"]], scores["tasks"]
    for row in rows:
        seeds = missing_seeds(row) or str(len(row["seeds"]))
        lines.append([row["title"], mean_of(row["metrics"]), f"{100 * row['mean']:.2f}", seeds])
    if scores.get("glue") is not None:
        missing = [f"{row['title']}: {missing_seeds(row)}" for row in rows if is_glue(row) and missing_seeds(row)]
        words = f" ({', '.join(missing)})" if missing else ""
        lines.append(["GLUE average", "", f"{100 * scores['glue']:.2f}{words}", ""])
    return markdown(lines) if rows else None


def is_glue(row: Facts) -> bool:
    """Whether a task's examples are GLUE's."""
    return row.get("glue", row["task"] in GLUE)


def missing_seeds(row: Facts) -> str:
    """Return "3 of 5 seeds" for a row with missing seeds, else an empty string."""
    return f"{len(row['seeds'])} of {row['of']} seeds" if len(row["seeds"]) < row.get("of", 0) else ""


def _tokenizer(checkpoint: "Checkpoint", name: str | None) -> str | None:
    """Return a tokenizer's name on the Hub, or a description of a local one, since its path is private."""
    if name is None or not is_path(name):
        return name
    if (tokenizer := checkpoint.load_tokenizer()) is None:
        return None
    config = json.loads(checkpoint.tokenizer_files().get("tokenizer_config.json", b"{}"))
    case = {True: ", lower case", False: ", case-sensitive"}.get(config.get("do_lower_case"), "")
    return f"{config.get('tokenizer_class', type(tokenizer).__name__)} with {len(tokenizer):,} tokens{case}"


def _start(config: Facts, result: Facts) -> str | None:
    """Return what training started from: a name on the Hub, or the last two parts of a path, which is private."""
    given = (config.get("model") or {}).get("pretrained_checkpoint"), config.get("starting_checkpoint_load_path")
    name = result.get("start") or next(filter(None, (*given, config.get("load_path"))), None)
    return "/".join(Path(name).parts[-2:]) if name and (is_path(name) or name.endswith(".pt")) else name


def is_path(name: str) -> bool:
    """Whether what could be a name on the Hub is a path, which is private."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def _read_run(checkpoint: "Checkpoint") -> tuple[Facts, Facts, Facts]:
    """Return config.yaml, the last evaluation up to the checkpoint and a job's result.json; empty if of another run."""
    folder, name = checkpoint.path.parent, checkpoint.run_name
    if name is None or checkpoint.published:
        return {}, {}, {}
    config, result = _read(folder / "config.yaml"), _read(folder / "result.json")
    if "task" not in result or not name.endswith(f"-{result.get('folder')}"):
        result = {}
    if config.get("run_name") != name:
        return {}, {}, result
    step = checkpoint.timestamp.get("batch", 0)
    lines = [line for line in read_json_lines(folder / METRICS) if "eval" in line and line["step"] <= step]
    return config, lines[-1] if lines else {}, result


def _source(config: Facts, loader: str) -> Facts:
    """Return a loader's settings, and the source of its shards by split.json: their name, hub_id and subset."""
    settings = config.get(loader, {})
    settings = settings.get("dataset", settings)
    if streams := settings.get("streams"):
        each = (_source({"": {"dataset": {**settings, "streams": None, **stream}}}, "") for stream in streams.values())
        return {**settings, "name": ", ".join(stream["name"] for stream in each), "hub_id": None, "subset": None}
    folder = settings.get("local") or config.get("data_local")
    if not folder:
        return {}
    stored = _read(Path(folder, str(settings.get("split")), "split.json")).get("source") or {}
    hub_id, subset, given = stored.get("dataset"), stored.get("data_subset"), stored.get("images")
    if hub_id and is_path(hub_id):
        hub_id, subset, given = None, None, hub_id
    # A pattern such as corpus/*.txt is only a meaningful name with its folder.
    paths = [Path(pattern) for pattern in stored.get("data_files") or [given or folder]]
    files = ", ".join("/".join(path.parts[-2:]) if "*" in path.name else path.name for path in paths)
    name = f"{hub_id} ({subset})" if hub_id and subset else hub_id or files
    return {"split": None, **settings, "name": name, "hub_id": hub_id, "subset": subset}


def read_scores(path: Path) -> Facts:
    """Return a report of glue.py, given report.json or its folder. Raises UserError if it is not one."""
    file = path / "report.json" if path.is_dir() else path
    scores = _read(file)
    if not scores.get("tasks"):
        raise UserError(f"--glue {path}: {file} is not a report of glue.py; give a report.json, or its folder")
    return scores


def _read(path: Path) -> Facts:
    """Return the contents of a YAML or JSON file; empty if it cannot be read."""
    try:
        content = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    except (ValueError, yaml.YAMLError, OSError):
        return {}
    return content if isinstance(content, dict) else {}
