"""A run's save_folder: whether a config may use it, whether its run is finished, its stored config and summary."""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from src.cli import is_main_process
from src.config import fixed_settings, read_stored, to_dict
from src.errors import RunFailed, UserError, reason
from src.files import LATEST, METRICS, check_writable, read_json_lines, write_atomically, write_json
from src.training.config import RunConfig
from src.training.task import Curve

CONFIG, SUMMARY = "config.yaml", "summary.json"


def check_save_folder(config: RunConfig, folder: Path) -> None:
    """Raise UserError for a folder in which this run's results would mix with another's."""
    check_writable("save_folder", folder)
    stored = read_stored(folder / CONFIG, type(config))
    if stored is None:
        if any(folder.glob("ep*-rank0.pt")):
            to_do = "restore it or choose another folder"
            raise UserError(f"save_folder: {folder} has checkpoints but no {CONFIG} that identifies their run; {to_do}")
        return
    if not config.autoresume:
        to_do = "choose another or set autoresume=true to resume it"
        raise UserError(f"save_folder: {folder} already holds a run; {to_do}")
    old, new = (fixed_settings(settings, type(config)) for settings in (stored, to_dict(config)))
    changed = {name for name, value in new.items() if old.get(name) != value}
    # A loader's copy of a key is not named besides it.
    if names := sorted(name for name in changed if "." not in name or name.rsplit(".", 1)[-1] not in changed):
        to_do = f"choose another folder, or resume with the config in {folder / CONFIG}"
        raise UserError(f"save_folder: {folder} holds a run that differs in {', '.join(names)}; {to_do}")
    if config.max_duration != stored["max_duration"]:
        from src.checkpoints.reading import read_checkpoint
        from src.training.checkpointing import check_remaining, latest_valid_checkpoint

        if (latest := latest_valid_checkpoint(folder)) is not None:
            check_remaining(read_checkpoint(latest), config.max_duration, f"save_folder: {latest}")


def is_finished(config: RunConfig, folder: Path) -> bool:
    """Return whether the folder holds exactly this run, finished."""
    return (folder / SUMMARY).is_file() and read_stored(folder / CONFIG, type(config)) == to_dict(config)


def save_config(config: RunConfig, folder: Path) -> None:
    """Store the resolved config next to the results."""
    if not is_main_process():
        return
    try:
        (folder / SUMMARY).unlink(missing_ok=True)  # of a shorter run that is now extended
        if read_stored(folder / CONFIG, type(config)) != to_dict(config):
            write_atomically(folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(to_dict(config))))
    except OSError as error:
        to_do = "free disk space or choose another folder"
        raise UserError(f"save_folder: cannot write to {folder}: {reason(error)}; {to_do}") from None


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are evaluations."""
    return [line for line in read_json_lines(folder / METRICS) if "eval" in line]


def is_evaluated(folder: Path, step: int) -> bool:
    """Return whether the run's last evaluation was at this step."""
    return any(line["step"] == step for line in evaluations(folder)[-1:])


def write_summary(
    config: RunConfig, curves: tuple[Curve, ...], parameters: int, folder: Path, step: int, title: str
) -> None:
    """Draw the curves with a title and write the summary. Raises RunFailed if they cannot be written."""
    if not is_main_process():
        return
    from src import plots

    retry = f"free disk space for {folder} and repeat the command"
    if not is_evaluated(folder, step):
        raise RunFailed(f"the run is finished and saved, but its last evaluation could not be written; {retry}")
    results = [
        {"step": line["step"], **{curve.name: line["eval"][curve.eval_key] for curve in curves}}
        for line in evaluations(folder)
    ]
    summary = {
        "run": config.run_name,
        "parameters": parameters,
        "seconds": read_json_lines(folder / METRICS)[-1]["seconds"],
        "before": results[0] if results[0]["step"] == 0 else None,
        "best": min(results, key=lambda result: result[curves[0].name]),
        "after": results[-1],
    }
    try:
        plots.curves([(config.run_name, folder)], curves, folder / "curves.png", title)
        write_json(folder / SUMMARY, summary)
    except OSError as error:
        raise RunFailed(f"the run is finished and saved, but its summary is not ({reason(error)}); {retry}") from None


def print_summary(folder: Path, curves: tuple[Curve, ...]) -> None:
    """Print the results of a finished run and where they are."""
    summary = json.loads((folder / SUMMARY).read_text())
    widths = {curve: max(8, len(curve.title) + 3) for curve in curves}
    print(f"\n{'':14}{''.join(curve.title.rjust(width) for curve, width in widths.items())}")
    for name in ("before", "best", "after"):
        result = summary[name]
        if result and not (name == "best" and result == summary["after"]):
            shown = f"{name}, step {result['step']:,}" if name == "best" else name
            values = (f"{result[c.name]:{width}{'.2%' if c.percent else '.3f'}}" for c, width in widths.items())
            print(f"{shown:14}{''.join(values)}")
    checkpoint = folder / LATEST
    print(f"\ncheckpoint    {checkpoint}\ncurves        {folder / 'curves.png'}\nmetrics       {folder / METRICS}")
    print(f"\nnext: python src/hub.py export --checkpoint {checkpoint} --out my-model")
