"""The README.md of a Hub folder, from the checkpoint and the files next to it. Unknown facts are omitted."""

import json
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from src.checkpoints.reading import Checkpoint
from src.publish.run_facts import Facts, RunFacts, at, is_glue, missing_seeds, read_run, read_source
from src.publish.spec import EXPORTS, ExportSpec
from src.tables import markdown

TEMPLATE = Path(__file__).with_name("card_template.md")


def model_card(checkpoint: Checkpoint, name: str, scores: Facts | None = None) -> str:
    """Return the card of a checkpoint exported to a folder called `name`. `scores` is a report.json of glue.py."""
    run, spec, scores = read_run(checkpoint), EXPORTS[checkpoint.class_name], scores or {"tasks": []}
    source = read_source(run.config, "train_loader")
    title = " ".join((checkpoint.run_name or name).split())
    results = _results(run, spec, scores["tasks"])
    dataset = "nyu-mll/glue" if run.result and is_glue(run.result) else source.get("hub_id")
    metadata = ModelCardData(
        model_name=title if results else None,
        eval_results=results or None,
        license=None if checkpoint.published else "apache-2.0",
        library_name="transformers",
        pipeline_tag=spec.pipeline_tag if checkpoint.tokenizer else None,
        tags=["lion", "linear-attention", checkpoint.config.mixer],
        datasets=[dataset] if dataset else None,
    )
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        title=title,
        name=name,
        checkpoint=checkpoint,
        model=checkpoint.config,
        # The decoder's weights are the word embeddings and count once.
        parameters=sum(t.numel() for part, t in checkpoint.weights.items() if part != "head.decoder.weight"),
        spec=spec,
        run=run,
        data=source.get("name"),
        split=at(run.config, "train_loader.dataset.split"),
        tokenizer=_tokenizer(checkpoint, run.config.get("tokenizer_name")),
        job=at(run.result, "settings.task") or {},
        eval_rate=at(run.config, "eval_loader.dataset.mlm_probability"),
        job_scores=_job_scores(run.result),
        task_scores=_task_scores(scores),
    )
    return f"{card.content.rstrip()}\n"


def _results(run: RunFacts, spec: ExportSpec, rows: list[Facts]) -> list[EvalResult]:
    """Return all scores as the Hub reads them."""

    def score(row: Facts, metric: str, value: float, split: str | None = None) -> EvalResult:
        task, title = row["task"], row["title"]
        glue = {"dataset_type": "nyu-mll/glue", "dataset_config": task, "dataset_name": f"GLUE {title}"}
        dataset = glue if is_glue(row) else {"dataset_type": task, "dataset_name": title}
        return EvalResult("text-classification", dataset_split=split, metric_type=metric, metric_value=value, **dataset)

    results = [score(row, " and ".join(row["metrics"]), row["mean"]) for row in rows]
    for split, values in run.result.get("scores", {}).items():
        results += [score(run.result, metric, value, split) for metric, value in values.items()]
    if run.evaluation and (source := read_source(run.config, "eval_loader")):
        facts = {"dataset_type": source.get("hub_id", source["name"]), "dataset_config": source.get("subset")}
        facts |= {"dataset_name": source["name"], "dataset_split": at(run.config, "eval_loader.dataset.split")}
        for metric in spec.metrics:
            if metric.hub_type and (value := run.evaluation["eval"].get(metric.key)) is not None:
                named = {"metric_type": metric.hub_type, "metric_value": value, "metric_name": metric.label}
                results.append(EvalResult(spec.pipeline_tag, **facts, **named))
    return results


def _tokenizer(checkpoint: Checkpoint, name: str | None) -> str | None:
    """Return a tokenizer's name on the Hub, or a description of a local one, since its path is private."""
    if name is None or not (name.startswith((".", "/", "~")) or Path(name).exists()):
        return name
    if (tokenizer := checkpoint.load_tokenizer()) is None:
        return None
    config = json.loads(checkpoint.tokenizer_files().get("tokenizer_config.json", b"{}"))
    case = {True: ", lower case", False: ", case-sensitive"}.get(config.get("do_lower_case"), "")
    return f"{config.get('tokenizer_class', type(tokenizer).__name__)} with {len(tokenizer):,} tokens{case}"


def _job_scores(result: Facts) -> str | None:
    """Return the table of a fine-tuned model's own scores."""
    lines = [["split", "metric", "score"]]
    for split, values in result.get("scores", {}).items():
        lines += [[split, metric, f"{100 * value:.2f}"] for metric, value in values.items()]
    return markdown(lines) if result else None


def _task_scores(scores: Facts) -> str | None:
    """Return the table of a report's scores."""
    lines, rows = [["task", "metric", "score", "seeds"]], scores["tasks"]
    for row in rows:
        seeds = missing_seeds(row) or str(len(row["seeds"]))
        lines.append([row["title"], " and ".join(row["metrics"]), f"{100 * row['mean']:.2f}", seeds])
    if scores.get("glue") is not None:
        missing = [f"{row['title']}: {missing_seeds(row)}" for row in rows if is_glue(row) and missing_seeds(row)]
        words = f" ({', '.join(missing)})" if missing else ""
        lines.append(["GLUE average", "", f"{100 * scores['glue']:.2f}{words}", ""])
    return markdown(lines) if rows else None
