"""`embed.py evaluate`: rankings of BEIR folders by any models, scored, compared, and written as TREC runs."""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

from src.checkpoints.remote import check_exists
from src.cli import check_alone, log
from src.embed.beir import Retrieval, read_beir
from src.embed.options import BM25, MODEL, add_reading, as_earlier, check_counts, fingerprint, open_model
from src.errors import UserError
from src.files import check_writable, distinct, read_result, sha256, write_atomically, write_json
from src.jobs.report import writing
from src.tables import markdown

COMPARED = "nDCG@10"  # the metric of differences
NOTE = (
    "Differences in nDCG@10 from {first}, in points, with 95% confidence interval and two-sided p-value, by a paired "
    "bootstrap of {resamples:,} resamples over the queries. The p-value is not corrected for the number of comparisons."
)
EXAMPLE = "python embed.py evaluate my-embedder bm25 --data cranfield qmsum-val --out scores"


def evaluate(argv: list[str]) -> None:
    """Run the command. Raises UserError, RunFailed."""
    check_alone("embed.py evaluate")
    options = parse(argv)
    check_counts(options, "resamples", "passages")
    if options.out is not None:
        check_writable("--out", options.out)
    titles = distinct(options.models, "MODEL")
    for model in options.models:  # before hours with the others
        check_exists(model, "MODEL")
    retrievals = {}
    for folder, title in zip(options.data, distinct([str(folder) for folder in options.data], "--data")):
        retrievals[title] = read_beir(folder, options.split)
        retrievals[title].name = title
        if options.passages and retrievals[title].passages:
            raise UserError(f"--passages: the documents of {folder} are passages already; omit it")
    results: dict[str, dict[str, Any]] = {}  # model → data set → what `score` returns
    for model, title in zip(options.models, titles):
        results[title] = evaluate_model(model, title, retrievals, options)
    differences = compare(results, options.resamples)
    shown = text(results, differences, options.resamples)
    print(f"\n{shown}")
    if options.out is not None:
        with writing(options.out):
            options.out.mkdir(parents=True, exist_ok=True)
            write_atomically(options.out / "report.md", f"# Retrieval\n\n{shown}\n")
            content = {"split": options.split, "results": results, "differences": differences}
            write_json(options.out / "report.json", content)
        print(f"\nreport    {options.out / 'report.md'}, report.json\nrankings  {options.out / 'runs'}")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "embed.py evaluate",
        description="Rank the documents of BEIR folders (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv) for each of "
        "their queries, by cosine or by BM25, and print nDCG@10, recall and reciprocal rank. Nothing is downloaded "
        "except a MODEL named on the Hub. With --out, repeat an interrupted command to resume.",
        epilog=f"Example: {EXAMPLE}",
    )
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help=f"{MODEL}; or bm25. The others are compared with the first")
    add("--data", metavar="DIR", type=Path, nargs="+", required=True, help="folders in BEIR's layout")
    add("--split", default="test", help="which qrels (default: test)")
    add("--out", type=Path, help="folder for report.md, report.json and rankings in TREC's format")
    add("--passages", type=int, metavar="TOKENS", help="score a document by its best passage of this many tokens, each "
        "with a vector that has seen the whole document")  # fmt: skip
    add_reading(parser)
    add("--resamples", type=int, default=1000, help="bootstrap resamples (default: 1000)")
    return parser.parse_args(argv)


def evaluate_model(
    model: str, title: str, retrievals: dict[str, Retrieval], options: argparse.Namespace
) -> dict[str, Any]:
    """Return data set → `score`. With --out, what an interrupted command has finished is read from there."""
    results, encoder = {}, None
    settings = {**fingerprint(model, options), "split": options.split, "passages": options.passages}
    for name, retrieval in retrievals.items():
        stem = re.sub(r"[^\w.-]+", "-", f"{name}.{title}")
        stored = None if options.out is None else options.out / "runs" / f"{stem}.json"
        of = {**settings, "data": data_digest(retrieval)}
        earlier = {**of, "files": as_earlier(of["files"])}
        found = None if stored is None else read_result(stored, of) or read_result(stored, earlier)
        if found is not None:
            log.info(f"{title} on {name}: read from {stored}")
        else:
            if encoder is None and model != BM25:
                encoder = open_model(model, options)
            found, run = score(encoder, retrieval, title, options)
            if stored is not None:
                from src.embed.scores import write_run

                with writing(options.out):
                    stored.parent.mkdir(parents=True, exist_ok=True)
                    write_run(stored.with_suffix(".trec"), run, re.sub(r"\s+", "-", title))
                    write_json(stored, {"of": of, **found})
        results[name] = found
    return results


def score(encoder: Any, retrieval: Retrieval, title: str, options: argparse.Namespace) -> tuple[dict, dict]:
    """Return what a model reaches, with the values of each query, and its ranking. Without an encoder: BM25."""
    from src.embed import scores

    start, read = time.perf_counter(), {}
    if encoder is None:
        from src.embed.bm25 import bm25

        ranking, run = scores.Ranking(retrieval), {}
        for query, found in bm25(retrieval):
            run |= ranking.run([query], [found])
    else:
        from src.embed.encoder import DOCUMENT, QUERY, Passages

        passages = None if options.passages is None else Passages(options.passages)
        name, texts = f"{title}: {retrieval.name}", [*retrieval.documents.values()]
        queries = encoder.encode([*retrieval.queries.values()], QUERY, f"{name}, queries")
        if retrieval.passages:
            documents = encoder.encode_passages(texts, retrieval.spans(), f"{name}, passages")
        else:
            documents = encoder.encode(texts, DOCUMENT, f"{name}, documents", passages)
        read = {
            "tokens": queries.tokens + documents.tokens, "limit": encoder.limit,
            "cut": {QUERY: queries.cut, DOCUMENT: documents.cut},
        }  # fmt: skip
        run = scores.rank(retrieval, scores.cosines(queries.vectors, documents.vectors, documents.owners))
    values = scores.measure(retrieval, run)
    counts = {"documents": len(retrieval.documents), "queries": len(retrieval.queries), "left_out": retrieval.left_out}
    counts |= {"skipped": retrieval.skipped}
    seconds = round(time.perf_counter() - start, 2)
    return {"scores": scores.means(values), **counts, **read, "seconds": seconds, "by_query": values}, run


def data_digest(retrieval: Retrieval) -> str:
    parts = (retrieval.documents, retrieval.queries, retrieval.judged, retrieval.passages)
    return sha256(json.dumps(item).encode() for part in parts for item in (len(part), *part.items()))


def compare(results: dict[str, dict[str, Any]], resamples: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return model → data set → how much higher its nDCG@10 is than the first model's."""
    from src.jobs.comparison import paired

    (_, base), *others = results.items()
    return {
        title: {
            name: paired(*([*of[name]["by_query"][COMPARED].values()] for of in (base, found)), resamples)._asdict()
            for name in found
        }
        for title, found in others
    }


def text(results: dict[str, dict[str, Any]], differences: dict[str, dict[str, Any]], resamples: int) -> str:
    """Return the tables, and how many texts were truncated and queries omitted."""
    from src.embed.scores import METRICS
    from src.jobs.comparison import Difference

    first, parts = next(iter(results)), []
    datasets = [*results[first]]
    for name in datasets:
        one = results[first][name]
        lines = [["model", *METRICS, *([f"nDCG@10 − {first}"] if differences else [])]]
        for title, found in results.items():
            gap = differences.get(title, {}).get(name)
            shown = [str(Difference(**gap)) if gap else ""] if differences else []
            lines.append([title, *(f"{100 * found[name]['scores'][metric]:.2f}" for metric in METRICS), *shown])
        left = f"; queries without a relevant document omitted: {one['left_out']:,}" if one["left_out"] else ""
        if skipped := one.get("skipped"):  # earlier versions had none
            left += f"; judgements of missing texts skipped: {skipped:,}, so scores are not those of the whole data set"
        parts.append(f"{name}: {one['queries']:,} queries, {one['documents']:,} documents{left}\n\n{markdown(lines)}")
        parts += [sentence for title, found in results.items() if (sentence := cut(title, found[name]))]
    if len(datasets) > 1:
        lines = [["mean of all", *METRICS]]
        for title, found in results.items():
            means = (sum(found[name]["scores"][metric] for name in datasets) / len(datasets) for metric in METRICS)
            lines.append([title, *(f"{100 * mean:.2f}" for mean in means)])
        parts.append(markdown(lines))
    if differences:
        parts.append(NOTE.format(first=first, resamples=resamples))
    return "\n\n".join(parts)


def cut(title: str, found: dict[str, Any]) -> str:
    """Say how many texts a model has truncated."""
    kinds = {"queries": found.get("cut", {}).get("query", 0), "documents": found.get("cut", {}).get("document", 0)}
    words = [f"{count:,} of {found[kind]:,} {kind}" for kind, count in kinds.items() if count]
    return f"{title} truncated {' and '.join(words)} to {found['limit']:,} tokens." if words else ""
