"""The checkpoint of a run's best evaluation: which it is, that it stays, and what a resumed run makes up for."""

import json
import math
import shutil
from pathlib import Path

import pytest
import warm

import main
from src.checkpoints.reading import read_checkpoint
from src.checkpoints.remote import checkpoint_step
from src.errors import UserError
from src.files import BEST, LATEST, link
from src.training.task import Curve, best_step

LOSS, TOP1 = Curve("loss", "loss", "eval/Loss"), Curve("top1", "top-1 accuracy", "eval/Top1", percent=True)
# The rate grows so large that the model is best after a few steps.
RISING = {
    "max_duration": "8ba", "eval_interval": "1ba", "save_interval": "4ba", "save_num_checkpoints_to_keep": 1,
    "save_best": "loss", "loggers": {}, "eval_subset_num_batches": 1,
    "scheduler": {"name": "linear_decay_with_warmup", "t_warmup": "8ba", "alpha_i": 1.0, "alpha_f": 1.0},
    "optimizer": {"lr": 0.1},
}  # fmt: skip


def evaluations(*values: float) -> list[tuple[int, dict[str, float]]]:
    return [(step, {"eval/Loss": value, "eval/Top1": value}) for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "lowest", "highest"),
    [
        ((), None, None),
        ((0.0,), None, None),  # before training
        ((0.0, 0.4, 0.2, 0.3), 2, 1),
        ((0.0, 0.2, 0.3, 0.2, 0.3), 1, 2),  # the first of equals
        ((0.0, math.nan, 0.3, math.inf), 2, 2),
    ],
)
def test_losses_are_best_low_and_percentages_high(values, lowest, highest):
    assert best_step(evaluations(*values), LOSS) == lowest
    assert best_step(evaluations(*values), TOP1) == highest
    assert best_step([(3, {})], LOSS) is None  # nothing counted in it


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {x["step"]: x["eval"]["eval/LanguageCrossEntropy"] for x in lines if "eval" in x and x["step"]}


def step_of(path: Path) -> int:
    return read_checkpoint(path).timestamp["batch"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_config) -> tuple[Path, Path]:
    """Config file and save_folder of a run of 8 steps that gets worse in the end."""
    folder = tmp_path_factory.mktemp("best")
    config = write_config(folder, **RISING)
    main.main([str(config)])
    return config, folder / "run"


@pytest.mark.slow
def test_the_best_step_is_kept_beside_the_newest(finished):
    config, folder = finished
    found = losses(folder)
    best = min(found, key=found.get)
    assert best not in (4, 8)  # where it is saved anyway
    assert step_of(folder / BEST) == best and step_of(folder / LATEST) == 8
    assert len(list(folder.glob("ep*-rank0.pt"))) == 2 and not list(folder.glob("*.unfinished"))
    assert json.loads((folder / "summary.json").read_text())["best"]["step"] == best
    _, printed = warm.run("main.py", config, "hf_export=end", output=folder / "output")
    assert f"the best one  {folder / BEST}\n" in printed and f"export --checkpoint {folder / BEST} --out" in printed
    last, first = (folder / "hub" / (folder / name).resolve().stem.removesuffix("-rank0") for name in (LATEST, BEST))
    assert printed.endswith(f"Hub folder    {last}\nthe best one  {first}\n")
    assert f"At step {best}, with" in (first / "README.md").read_text()


@pytest.mark.slow
def test_a_resumed_run_knows_what_was_best(finished, tmp_path, caplog, capsys):
    config, before = finished
    found = losses(before)
    best = min(found, key=found.get)
    folder = tmp_path / "run"
    shutil.copytree(before, folder, symlinks=True)
    command = [str(config), f"save_folder={folder}"]
    (folder / BEST).unlink()  # as if killed before it was set
    main.main([*command, "max_duration=9ba"])
    assert losses(folder)[9] > found[best] and step_of(folder / BEST) == best
    assert "save_best" not in caplog.text
    (folder / BEST).resolve().unlink()
    (folder / BEST).unlink()
    capsys.readouterr()
    main.main([*command, "max_duration=10ba"])
    assert f"save_best: step {best} has the best loss so far, and its checkpoint is not in {folder}" in caplog.text
    assert not (folder / BEST).exists() and f"export --checkpoint {folder / LATEST}" in capsys.readouterr().out
    link(folder / BEST, (folder / LATEST).resolve().name)  # of another curve, say
    main.main([*command, "max_duration=11ba"])
    assert "the best one" not in capsys.readouterr().out and step_of(folder / BEST) == 10


@pytest.mark.slow
def test_what_is_no_longer_the_best_is_deleted_at_once(finished, tmp_path):
    config, before = finished
    best, folder = step_of(before / BEST), tmp_path / "run"
    main.main([str(config), f"save_folder={folder}", f"max_duration={best}ba", "scheduler.t_warmup=8ba"])
    assert step_of(folder / BEST) == step_of(folder / LATEST) == best
    assert [checkpoint_step(path.name) for path in folder.glob("ep*-rank0.pt")] == [best]


@pytest.mark.slow
def test_a_repeated_evaluation_saves_nothing_again(finished, tmp_path):
    config, before = finished
    folder, found = tmp_path / "run", losses(before)
    best = min(found, key=found.get)
    command = [str(config), f"save_folder={folder}", "save_interval=1ba", "save_num_checkpoints_to_keep=-1"]
    main.main(command)
    for path in folder.glob("*-rank0.pt"):
        if (checkpoint_step(path.name) or 9) > best:
            path.unlink()
    (path,) = folder.glob(f"ep*-ba{best}-rank0.pt")
    content, lines = path.read_bytes(), (folder / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if not ('"eval"' in line and json.loads(line)["step"] >= best)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))  # killed during the evaluation
    (folder / "summary.json").unlink()
    main.main(command)
    assert losses(folder) == found and step_of(folder / BEST) == best
    assert path.read_bytes() == content


@pytest.mark.slow
def test_a_machine_with_an_empty_folder_gets_the_best_one_too(finished, tmp_path):
    config, before = finished
    store, folder = tmp_path / "store", tmp_path / "run"
    best = step_of(before / BEST)
    shutil.copytree(before, tmp_path / "first", symlinks=True)
    main.main([str(config), f"save_folder={tmp_path / 'first'}", f"save_remote={store}", "max_duration=9ba"])
    assert (store / BEST).read_text().startswith("ep") and (store / (store / BEST).read_text().strip()).is_file()
    main.main([str(config), f"save_folder={folder}", f"save_remote={store}", "max_duration=10ba"])
    assert step_of(folder / BEST) == best and step_of(folder / LATEST) == 10


def test_an_unknown_curve_is_named(write_config, tmp_path):
    with pytest.raises(UserError, match=r"save_best=top1 must be one of loss, accuracy$"):
        main.main([str(write_config(tmp_path, **RISING)), "save_best=top1"])
