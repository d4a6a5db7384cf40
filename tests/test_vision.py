"""Image classification as a user runs it: run outputs, resuming with every augmentation on, ranks, mistakes, evaluation,
Hub folders."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import warm
import yaml
from composer.utils import reproducibility
from conftest import ROOT, assert_one_sentence, run
from datasets import ClassLabel, load_dataset
from PIL import Image

import vision
from src import convert_dataset
from src.checkpoints.reading import read_checkpoint
from src.data.image_transforms import Evaluation
from src.data.images import decode
from src.errors import UserError
from src.files import BEST
from src.training import run as run_folder
from src.training.config import load_config
from src.vision.config import VisionConfig
from src.vision.evaluate import evaluate
from src.vision.task import Vision

pytestmark = pytest.mark.slow  # most tests need a run
CLASSES = ("blue", "green", "red")
MODEL = {
    "mixer": "lion-s", "patch_order": "snakes", "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "drop_path_rate": 0.2, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """A folder with the splits train and val, of 24 and 9 noisy pictures, each in a colour that is its class."""
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 100, (14, 18, 3), dtype=np.uint8)
                pixels[..., 2 - label] += 120
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def write_config(pictures):
    """write_config(folder, key=value, ...) → a tiny config with all of DeiT's augmentation that saves to folder/run."""

    def write(folder: Path, **changes) -> Path:
        config = {
            "inherit": str(ROOT / "yamls" / "vision" / "recipe.yaml"),
            "run_name": "tiny", "model": MODEL, "data_local": str(pictures), "image_size": 12,
            "train_loader": {"num_workers": 0}, "eval_loader": {"num_workers": 0},
            "algorithms": {"ema": {"half_life": "3ba"}, "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}},
            "scheduler": {"t_warmup": "1ep"}, "augmentation": {"erasing": 0.5, "jitter": 0.1}, "loggers": {}, "callbacks": {},
            "max_duration": "3ep", "global_train_batch_size": 6, "device_train_microbatch_size": 3,
            "device_eval_batch_size": 4, "eval_interval": "3ba", "save_interval": "3ba", "log_interval": "1ba",
            "save_num_checkpoints_to_keep": -1, "device": "cpu", "progress_bar": False, "save_folder": str(folder / "run"),
        }  # fmt: skip
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump({**config, **changes}))
        return path

    return write


@pytest.fixture
def config_file(tmp_path, write_config) -> Path:
    return write_config(tmp_path)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[dict]:
    """The metrics that do not depend on the clock."""
    timed = ("seconds", "samples_per_second", "tokens_per_second")
    return [{name: value for name, value in line.items() if name not in timed} for line in metrics(folder)]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Everything numeric that a checkpoint restores: weights, averages and the optimizer's state."""
    state = torch.load(path, weights_only=False)["state"]
    ema = dict(state["algorithms"])["EMA"]["ema_model"]["named_parameters_dict"]
    (optimizer,) = state["optimizers"].values()
    kept = {f"{name}.{part}": x for name, each in optimizer["state"].items() for part, x in each.items()}
    ema = {f"ema.{name.removeprefix('module.')}": x for name, x in ema.items()}
    return {**state["model"], **ema, **kept}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_config) -> tuple[Path, Path]:
    """Config file and save_folder of a run of 12 steps in 3 epochs."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder)
    vision.main([str(config)])
    return config, folder / "run"


def test_a_run_writes_what_every_run_writes(finished, capsys):
    config, folder = finished
    lines = metrics(folder)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in lines if "eval" in line] == [3, 6, 9, 12]
    assert set(lines[-1]["eval"]) == {f"eval/{name}" for name in ("CrossEntropy", "Top1", "Top5", "MajorityAccuracy")}
    assert lines[-1]["eval"]["eval/MajorityAccuracy"] == pytest.approx(1 / 3)
    assert lines[-2]["samples"] == 72 and (folder / "curves.png").is_file()
    vision.main([str(config)])
    printed = capsys.readouterr().out
    assert "top-1 accuracy" in printed and "next: python src/hub.py export" in printed


@pytest.mark.parametrize(("step", "workers"), [(3, 2), (6, 0), (8, 1)])
def test_a_killed_run_resumes_bit_identically(finished, tmp_path, step, workers):
    """In the middle of the first epoch with other workers, after an epoch and a half, and at an epoch's last step."""
    config, before = finished
    if step == 8:  # a run that saved at the last step of an epoch
        whole = tmp_path / "whole"
        vision.main([str(config), f"save_folder={whole}", "save_interval=4ba"])
        assert numbers(whole) == numbers(before)
        before = whole
    folder = tmp_path / "run"
    shutil.copytree(before, folder, symlinks=True)
    (folder / "summary.json").unlink()
    for path in folder.glob("ep*.pt"):
        if int(path.name.split("-")[1][2:]) > step:
            path.unlink()
    vision.main([str(config), f"save_folder={folder}", f"train_loader.num_workers={workers}"])
    assert numbers(folder) == numbers(before)
    expected, found = tensors(before / "latest-rank0.pt"), tensors(folder / "latest-rank0.pt")
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_what_is_evaluated_and_exported_are_the_averaged_weights(finished, pictures, tmp_path, capsys):
    _, folder = finished
    read = read_checkpoint(folder / "latest-rank0.pt")
    state = torch.load(folder / "latest-rank0.pt", weights_only=False)["state"]
    ema = dict(state["algorithms"])["EMA"]["ema_model"]["named_parameters_dict"]
    assert all(torch.equal(read.weights[name.removeprefix("model.")], tensor) for name, tensor in ema.items())
    assert not torch.equal(read.weights["classifier.weight"], state["model"]["model.classifier.weight"])
    evaluate([str(folder / "latest-rank0.pt"), "--data", str(pictures), "--num_workers", "0", "--out", str(tmp_path)])
    report, last = json.loads((tmp_path / "report.json").read_text()), metrics(folder)[-1]["eval"]
    assert report["top1"] == pytest.approx(last["eval/Top1"]) and report["top5"] == pytest.approx(last["eval/Top5"])
    assert report["loss"] == pytest.approx(last["eval/CrossEntropy"], abs=1e-5)
    assert sum(map(sum, report["confusion"])) == 9 and (tmp_path / "confusion.png").is_file()
    assert "| blue" in capsys.readouterr().out


def test_a_class_without_images_to_evaluate_shifts_no_others(pictures, tmp_path, write_config, caplog):
    shutil.copytree(pictures, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "val" / "green")
    overrides = [f"data_local={tmp_path / 'data'}", "device_eval_batch_size=9"]
    task = Vision(load_config(VisionConfig, "vision.py", "", [str(write_config(tmp_path)), *overrides]))
    assert task.build_model(None).model.config.num_labels == 3
    assert f"{tmp_path / 'data' / 'val'} has no images of 1 of 3 classes: green" in caplog.messages
    _, evaluation = task.build_loaders(3)
    (batch,) = evaluation.dataloader
    assert sorted(batch["labels"].tolist()) == [0, 0, 0, 2, 2, 2]


def test_classes_of_other_names_are_matched_by_number(finished, pictures, tmp_path, capsys):
    _, folder = finished
    for number, name in enumerate(CLASSES):
        shutil.copytree(pictures / "val" / name, tmp_path / "val" / f"n0{number}")
    command = [str(folder / "latest-rank0.pt"), "--num_workers", "0", "--data"]
    with pytest.raises(
        UserError, match=r"does not know the classes n00, n01, n02 .* give --by_number if only the names"
    ):
        evaluate([*command, str(tmp_path)])
    evaluate([*command, str(pictures)])
    by_name = capsys.readouterr().out
    evaluate([*command, str(tmp_path), "--by_number"])
    by_number = capsys.readouterr().out
    assert by_number[by_number.index("| class") :] == by_name[by_name.index("| class") :]


def test_pictures_without_labels_are_classified(finished, pictures, tmp_path, capsys, caplog):
    checkpoint, folder = str(finished[1] / "latest-rank0.pt"), tmp_path / "new"
    shutil.copytree(pictures / "val", folder / "deep")
    (folder / "notes.txt").write_text("no picture")
    (folder / "a.png").write_bytes(b"")
    (folder / "b.png").write_bytes((folder / "deep" / "red" / "0.png").read_bytes()[:99])
    odd = os.fsencode(folder) + b'/deep/red/a,b "c"\r\n\xff.png'  # not the name of any encoding
    shutil.copyfile(os.fsencode(folder / "deep" / "red" / "0.png"), odd)
    named = str(folder / "deep" / "red" / "0.png")
    command = ["predict", checkpoint, str(folder), named, "--batch_size", "2", "--top", "9"]
    vision.main([*command, "--num_workers", "1", "--out", str(tmp_path / "out" / "found.csv")])
    with (tmp_path / "out" / "found.csv").open(errors="surrogateescape", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == sorted(map(str, folder.rglob("deep/*/*.png")))  # each once
    assert os.fsdecode(odd) in {row["file"] for row in rows} and "class_3" in rows[0] and "class_4" not in rows[0]
    assert f"{folder / 'a.png'} is empty" in caplog.messages and "2 of 12 files could not be read" in caplog.messages
    assert not (tmp_path / "out" / "found.csv.unfinished").exists()
    assert f"{folder / 'b.png'} is not a readable image" in caplog.text
    read = read_checkpoint(Path(checkpoint))
    model, transform = read.build(), Evaluation(read.processor)
    for row in rows:
        with torch.no_grad():
            expected = model(transform(decode(Path(row["file"]).read_bytes(), ""))[None]).logits[0].softmax(0)
        found = {row[f"class{place}"]: float(row[f"probability{place}"]) for place in ("", "_2", "_3")}
        assert [found[name] for name in CLASSES] == pytest.approx(expected.tolist(), abs=1e-4)
        assert [*found.values()] == sorted(found.values(), reverse=True)
    printed = capsys.readouterr().out
    assert (
        sum(int(line.split()[0]) for line in printed.splitlines() if line.split()[1:] and line.split()[1] in CLASSES)
        == 10
    )
    vision.main(["predict", str(finished[1]), named, os.fsdecode(odd)])  # a run's folder: its latest checkpoint
    (row,) = (row for row in rows if row["file"] == named)
    escaped = str(folder / "deep" / "red" / r'a,b "c"\x0d\x0a\xff.png')
    shown = [f"{file}  {row['class']} {float(row['probability']):.1%}" for file in (named, escaped)]
    assert capsys.readouterr().out == "\n".join([*shown, ""])


def test_mistakes_in_predicting(finished, pictures, tmp_path):
    checkpoint, picture = str(finished[1] / "latest-rank0.pt"), str(pictures / "val" / "red" / "0.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.png").write_bytes(b"x")
    for mistake, words in {
        (str(tmp_path / "none.png"),): "none.png is not a file or folder; fix its path",
        (str(tmp_path / "empty"),): "empty has no pictures (.jpg, .jpeg,",
        (str(tmp_path / "bad.png"), "--num_workers", "0"): "none of the files is a readable picture",
        (picture, "--top", "0"): "--top 0 must be at least 1",
        (picture, "--batch_size", "0"): "--batch_size 0 must be at least 1",
        (picture, "--num_workers", "0", "--out", str(tmp_path / "bad.png" / "x.csv")): "cannot be written",
        (picture, "--out", str(tmp_path)): "is a folder; name a file in it",
    }.items():
        with pytest.raises(UserError) as error:
            vision.main(["predict", checkpoint, *mistake])
        assert words in str(error.value)


def test_what_a_patch_sees(finished, pictures, tmp_path, capsys):
    from src.vision.draw import draw
    from src.vision.pictures import masks

    checkpoint, picture = str(finished[1] / "latest-rank0.pt"), str(pictures / "val" / "red" / "0.png")
    draw([checkpoint, picture, "--patch", "0", "2", "--out", str(tmp_path / "drawn")])
    names = "attention.png", "mask.png", "orders.png"
    assert all((tmp_path / "drawn" / name).stat().st_size > 1000 for name in names)
    for mistake, words in {
        (checkpoint, picture, "--patch", "3", "0"): "--patch 3 0 is outside the grid of 3 × 3 patches",
        (checkpoint, str(tmp_path)): "cannot be read",
        (checkpoint, picture, "--image_size", "13"): "must be one or two multiples of the patch, 4",
    }.items():
        with pytest.raises(UserError) as error:
            draw([*mistake, "--out", str(tmp_path / "none")])
        assert words in str(error.value)
    model = read_checkpoint(Path(checkpoint)).build().eval()
    x = torch.randn(1, 3, 12, 8)
    with torch.no_grad():
        found, states = masks(model, x), model.lion(x, output_hidden_states=True).hidden_states
        for layer, state, mask in zip(model.lion.layers, states, found):
            decays = layer.attention.log_decays(layer.before_mixing(state))[0].exp()  # heads by rows, then by columns
            for head in range(2):
                weights = []
                for each, order in zip((head, 2 + head), ([0, 1, 2, 4, 3, 5, 6], [0, 1, 3, 5, 6, 4, 2])):
                    at = {token: place for place, token in enumerate(order)}
                    spans = [(at[j], at[5]) if at[j] < at[5] else (at[5] + 1, at[j] + 1) for j in range(7)]
                    weights.append(torch.stack([decays[each, order[start:end]].prod() for start, end in spans]))
                expected = sum(weights)
                torch.testing.assert_close(mask[head, 5], expected / expected.sum(), atol=1e-5, rtol=1e-4)


def test_an_order_of_patches_that_changes_nothing_is_reported(tmp_path, write_config, caplog):
    assert start_from(write_config(tmp_path))[0].patch_order == "snakes" and "changes nothing" not in caplog.text
    assert start_from(write_config(tmp_path, model={**MODEL, "mixer": "softmax"}))[0].patch_order == "snakes"
    assert "model.patch_order=snakes changes nothing for softmax, which has no decays" in caplog.messages


VARIANTS = {
    "lion-lit": {"patch_order": "raster"}, "lion-d": {"patch_order": "raster"}, "lion-s": {"patch_order": "raster"},
    "lion-d snakes": {}, "lion-s snakes": {}, "softmax": {"patch_order": "raster"},
}  # fmt: skip


@pytest.fixture(scope="module")
def shards(pictures, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    convert_dataset.main(["--images", str(pictures), "--out_root", str(folder / "shards")])
    return folder / "shards"


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_train_as_one(tmp_path, write_config, shards, variant):
    """With augmentation, and without what depends on a device's batch: mixing, and dropped paths. Once from shards."""
    model = {**MODEL, **VARIANTS[variant], "mixer": variant.split()[0], "drop_path_rate": 0.0}
    same = {"model": model, "mixing": {"chance": 0.0}, "max_duration": "3ba", "hf_export": None}
    same |= {"save_best": "top1", "eval_interval": "2ba", "save_interval": "3ba"}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    vision.main([str(write_config(tmp_path / "one", **same))])
    two = write_config(tmp_path / "two", **same, **({"data_local": str(shards)} if variant == "softmax" else {}))
    statuses, output = warm.run_ranks(2, "vision.py", two, output=tmp_path / "output")
    assert statuses == [0, 0], output
    check_equal(tmp_path / "one", tmp_path / "two", steps=3)
    if variant == "lion-s snakes":  # resumed on another number of devices
        vision.main([str(two), "max_duration=5ba"])
        one = tmp_path / "one" / "tiny.yaml"
        statuses, output = warm.run_ranks(2, "vision.py", one, "max_duration=5ba", output=tmp_path / "resumed")
        assert statuses == [0, 0], output
        check_equal(tmp_path / "one", tmp_path / "two", steps=5)
        for name in ("one", "two"):
            (before,) = (tmp_path / name / "run").glob("ep*-ba3-rank0.pt")
            before, after = tensors(before), tensors(tmp_path / name / "run" / "latest-rank0.pt")
            averages = [key for key in before if key.startswith("ema.model.") and "position" not in key]
            assert averages and not any(torch.equal(before[key], after[key]) for key in averages)


def check_equal(one: Path, two: Path, steps: int) -> None:
    runs = [folder / "run" for folder in (one, two)]
    one, two = map(numbers, runs)
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (one, two)]
    assert len(losses[0]) == steps and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert two[-1]["eval"] == pytest.approx(one[-1]["eval"], rel=1e-5)
    assert read_checkpoint(runs[0] / BEST).timestamp == read_checkpoint(runs[1] / BEST).timestamp


def test_a_hub_folder_classifies_pictures(finished, pictures, tmp_path):
    _, folder = finished
    done = run("src/hub.py", "export", "--checkpoint", folder / "latest-rank0.pt", "--out", tmp_path / "my-model")
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "my-model" / "README.md").read_text()
    assert "pipeline_tag: image-classification" in card and "top-1 accuracy" in card and "classes: 3" in card
    config = json.loads((tmp_path / "my-model" / "config.json").read_text())
    assert list(config["id2label"].values()) == list(CLASSES)
    from transformers import pipeline

    classify = pipeline("image-classification", model=str(tmp_path / "my-model"), trust_remote_code=True)
    found = classify(str(pictures / "val" / "red" / "0.png"))
    assert {each["label"] for each in found} == set(CLASSES)
    fine = ["model={pretrained_checkpoint: " + str(tmp_path / "my-model") + "}", "image_size=16", "max_duration=1ba"]
    yaml_file = tmp_path / "fine.yaml"
    content = yaml.safe_load((finished[0]).read_text())
    yaml_file.write_text(yaml.safe_dump({**content, "model": {}, "save_folder": str(tmp_path / "fine")}))
    vision.main([str(yaml_file), *fine])
    assert metrics(tmp_path / "fine")[-1]["step"] == 1


@pytest.mark.parametrize(
    ("warmup", "is_long"),
    [("1ep", False), ("2ep", True), ("7ba", False), ("8ba", True), ("47sp", False), ("48sp", True)],
)
def test_a_warm_up_that_fills_the_run_is_reported(tmp_path, write_config, caplog, monkeypatch, warmup, is_long):
    def stop(*_):
        raise SystemExit

    monkeypatch.setattr(run_folder, "save_config", stop)
    with pytest.raises(SystemExit):
        vision.main([str(write_config(tmp_path, max_duration="2ep", scheduler={"t_warmup": warmup}))])
    told = f"scheduler.t_warmup={warmup} is no shorter than the run, so the learning rate never reaches optimizer.lr"
    assert (told in caplog.text) == is_long


def test_a_schedule_of_ones_own_may_warm_up_in_units_of_its_own(tmp_path, write_config):
    schedule = "from composer.optim import ConstantScheduler\n\nclass Own(ConstantScheduler):\n"
    (tmp_path / "own_schedule.py").write_text(
        f"{schedule}    def __init__(self, t_warmup):\n        super().__init__()\n"
    )
    mine = {"name": "own_schedule:Own", "t_warmup": 100, "alpha_i": None, "alpha_f": None}
    own = {"scheduler": mine, "code_paths": [str(tmp_path / "own_schedule.py")]}
    vision.main([str(write_config(tmp_path, max_duration="1ba", **own))])
    assert metrics(tmp_path / "run")[-1]["step"] == 1


def test_a_run_does_not_go_on_with_other_classes(finished, pictures, tmp_path):
    """Its classifier would learn them under the numbers, and the names, of the old ones."""
    config, before = finished
    folder = tmp_path / "run"
    shutil.copytree(before, folder, symlinks=True)
    renamed, more, reordered = (tmp_path / name for name in ("renamed", "more", "reordered"))
    for data in (renamed, more):
        shutil.copytree(pictures, data)
    for split in ("train", "val"):
        (renamed / split / "blue").rename(renamed / split / "violet")
        shutil.copytree(more / split / "blue", more / split / "grey")
        images = load_dataset("imagefolder", data_dir=str(pictures / split), split="train")
        order = ClassLabel(names=["red", "green", "blue"])
        images = images.map(lambda row: {"label": 2 - row["label"]}).cast_column("label", order)
        reordered.mkdir(exist_ok=True)
        images.to_parquet(reordered / f"{split}.parquet")
    found = {
        renamed: "only the checkpoint has blue, only the data has violet",
        more: "only the data has grey",
        reordered: "in their order",
    }
    start = "load_path=" + str(before / "latest-rank0.pt")
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for data, words in found.items():
        command = [str(config), f"data_local={data}", "max_duration=4ep"]
        name = (
            rf"data_local, to resume from {folder}/ep2-ba12-rank0.pt: the classes differ from the data's \({words}\);"
        )
        with pytest.raises(UserError, match=name):
            vision.main([*command, f"save_folder={folder}"])
        words = words if data != more else "is a checkpoint of a different model"
        with pytest.raises(UserError, match=f"load_path=.*{words}"):
            vision.main([*command, start, f"save_folder={tmp_path / 'new'}"])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept
    shutil.copytree(pictures, tmp_path / "moved")
    vision.main([str(config), f"data_local={tmp_path / 'moved'}", f"save_folder={folder}", "max_duration=13ba"])
    assert metrics(folder)[-1]["step"] == 13


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> Path:
    """A folder of a ViT of transformers that reads images of mean and standard deviation 0.5, as many do."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    names = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: number for number, name in enumerate(CLASSES)}}
    folder = tmp_path_factory.mktemp("vit")
    ViTForImageClassification(ViTConfig(**sizes, image_size=12, patch_size=4, **names)).save_pretrained(folder)
    ViTImageProcessor(size=12).save_pretrained(folder)
    return folder


def test_images_are_normalized_as_the_start_was_trained(vit, tmp_path, write_config, caplog):
    half = [0.5, 0.5, 0.5]
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(vit)}, max_duration="1ba")
    vision.main([str(config)])
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert stored["mean"] == stored["std"] == half
    read = read_checkpoint(tmp_path / "run" / "latest-rank0.pt")
    assert read.processor["image_mean"] == read.processor["image_std"] == half
    assert "omit" not in caplog.text
    vision.main([str(config)])
    assert "tiny is already finished with this config" in caplog.messages
    vision.main([str(config), "max_duration=2ba"])  # resumes, though the config's mean is null
    assert metrics(tmp_path / "run")[-1]["step"] == 2
    with pytest.raises(UserError, match="holds a run that differs in mean;"):
        vision.main([str(config), "max_duration=3ba", "mean=[0.4,0.4,0.4]"])
    start = f"load_path={tmp_path / 'run' / 'latest-rank0.pt'}", "max_duration=3ba", f"save_folder={tmp_path / 'next'}"
    content = yaml.safe_load(config.read_text())
    same = {"mixer": "softmax", **content["model"], **{k: MODEL[k] for k in ("hidden_size", "patch_size")}}
    same |= {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32, "position_embedding": "learned"}
    same |= {"class_token": True, "layer_norm_eps": 1e-12}
    config.write_text(yaml.safe_dump({**content, "model": same | {"pretrained_checkpoint": None}}))
    with pytest.raises(UserError, match=r"set mean=\[0.5,0.5,0.5\] std=\[0.5,0.5,0.5\]$"):
        vision.main([str(config), *start])
    vision.main([str(config), *start, "mean=[0.5,0.5,0.50001]", "std=[0.5,0.5,0.5]"])


def start_from(config: Path, *overrides: str):
    """The configuration and the processor of the model that a config starts from."""
    task = Vision(load_config(VisionConfig, "vision.py", "", [str(config), *overrides]))
    return task.build_model(None).model.config, task.processor


def test_another_normalization_than_the_starts_is_reported(vit, tmp_path, write_config, caplog):
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(vit)})
    _, processor = start_from(config, "mean=[0.485,0.456,0.406]")
    assert processor["image_mean"] == [0.485, 0.456, 0.406] and processor["image_std"] == [0.5] * 3
    told = (
        f"mean=[0.485,0.456,0.406], where {vit} has [0.5,0.5,0.5]; set mean=null to normalize images as it was trained"
    )
    assert told in caplog.messages
    assert start_from(write_config(tmp_path))[1]["image_mean"] == [0.485, 0.456, 0.406]
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(vit), "hidden_size": 24})
    assert start_from(config, "model.hidden_size=null")[0].hidden_size == 16  # the start's, not a recipe's
    shutil.copytree(vit, tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").unlink()
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(tmp_path / "vit")})
    assert start_from(config)[1]["image_mean"] == [0.485, 0.456, 0.406]
    guess, though = f"{tmp_path / 'vit'} does not name", "as of ImageNet, though many ViTs have 0.5"
    of_mean = f"{guess} mean: assumed to be [0.485,0.456,0.406], {though}; if that is wrong, set mean"
    of_std = f"{guess} std: assumed to be [0.229,0.224,0.225], {though}; if that is wrong, set std"
    assert [message for message in caplog.messages if guess in message] == [of_mean, of_std]
    caplog.clear()
    assert start_from(config, "mean=[0.5,0.5,0.5]")[1]["image_mean"] == [0.5] * 3
    assert of_std in caplog.messages and of_mean not in caplog.messages
    caplog.clear()
    assert start_from(config, "mean=[0.5,0.5,0.5]", "std=[0.5,0.5,0.5]")[1]["image_std"] == [0.5] * 3
    assert guess not in caplog.text and "=null" not in caplog.text
    stored = json.loads((vit / "preprocessor_config.json").read_text())
    del stored["image_mean"], stored["image_std"]
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(stored))
    assert start_from(config)[1]["image_mean"] == [0.5] * 3  # the default of its class


def test_classes_that_a_start_numbers_from_1_get_a_new_classifier(vit, tmp_path, write_config, caplog):
    shutil.copytree(vit, tmp_path / "vit")
    stored = json.loads((vit / "config.json").read_text())
    names = {"id2label": {"1": "blue", "2": "green", "3": "red"}, "label2id": {"blue": 1, "green": 2, "red": 3}}
    (tmp_path / "vit" / "config.json").write_text(json.dumps(stored | names))
    with caplog.at_level("INFO", logger="lion"):
        found, _ = start_from(write_config(tmp_path, model={"pretrained_checkpoint": str(tmp_path / "vit")}))
    assert [*found.id2label.values()] == [*CLASSES] and "with a new classifier" in caplog.text


def test_what_a_file_does_not_name_may_be_given(tmp_path, write_config, caplog):
    torch.manual_seed(0)
    sizes = {"img_size": 12, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_classes": 3}
    model = timm.models.VisionTransformer(**sizes, num_heads=2).eval()
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    torch.save(model.state_dict(), tmp_path / "it.pth")
    config = write_config(tmp_path, model={"pretrained_checkpoint": str(tmp_path / "it.pth")})
    assert start_from(config)[0].num_attention_heads == 1
    assert "does not name num_attention_heads: assumed to be 1, one per 64 channels" in caplog.text
    assert "if that is wrong, set model.num_attention_heads" in caplog.text
    caplog.clear()
    command = [str(config), "model.num_attention_heads=2", "mean=[0.5,0.5,0.5]", "std=[0.5,0.5,0.5]"]
    task = Vision(load_config(VisionConfig, "vision.py", "", command))
    found, images = task.build_model(None).model.eval(), torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(found(images).logits, model(images), atol=1e-5, rtol=1e-5)
    assert not any("does not name" in each.message for each in caplog.records if each.levelname == "WARNING")
    with pytest.raises(UserError, match=r"num_attention_heads"):
        start_from(config, "model.num_attention_heads=5")


def test_mistakes_end_in_one_sentence(config_file, pictures, tmp_path, checkpoint):
    assert_one_sentence(
        run("vision.py", config_file, "data_local=./no/pictures"), "data_local: ./no/pictures is not a folder"
    )
    (tmp_path / "classes" / "train" / "empty").mkdir(parents=True)
    broken = tmp_path / "broken"
    shutil.copytree(pictures, broken)
    (broken / "train" / "red" / "3.png").write_bytes(b"")
    lost = tmp_path / "lost"
    shutil.copytree(pictures, lost)
    (lost / "train" / "red" / "8.png").symlink_to("no such file")
    other = tmp_path / "other"
    shutil.copytree(pictures, other)
    (other / "val" / "red").rename(other / "val" / "violet")
    single = tmp_path / "single"
    for split in ("train", "val"):
        shutil.copytree(pictures / split / "red", single / split / "red")
    mistakes = {
        f"data_local={tmp_path / 'classes'}": "no images in class empty; add some or remove the folder",
        f"data_local={broken}": "red/3.png is empty; replace or remove it",
        f"data_local={lost} train_loader.num_workers=1": "red/8.png cannot be read (No such file or directory); restore",
        f"data_local={other}": "lacks (violet); use the same in both",
        "eval_loader.split=test": "test/CLASS",
        "image_size=13": "image_size=13 is not divisible by patch_size=4",
        "image_size=big": "image_size=big must be a number of pixels, or [height, width]",
        "model.image_size=3": "set image_size instead",
        f"model.pretrained_checkpoint={checkpoint}": "reads texts; give a model that reads images",
        "model.mixr=lion-d": "unknown key model.mixr; did you mean mixer?",
        "freeze=[attention.decai]": "freeze: no parameter has attention.decai in its name",
        "loss.kind=binary": "loss.smoothing makes every class a target",
        "freeze=[lion,classifier]": "freeze=[lion,classifier] leaves no parameter to train; omit a part",
        "model.mixer=lions": "mixer of images must be one of lion-lit, lion-d, lion-s, softmax (got lions)",
        f"model.pretrained_checkpoint={single}": "holds no config.json or model.safetensors; give a folder that has",
        "global_train_batch_size=30": "24 images per device, fewer than a batch of 30",
        "augmentation.policy=autoaugment": "augmentation.policy=autoaugment must be one of",
        "std=[1,1,0]": "std=[1.0, 1.0, 0.0] must be three numbers above 0",
        f"data_local={single}": "the data has one class, red, and a classifier needs two",
        "model.attention_probs_dropout_prob=0.1 model.attention_form=recurrent": "needs the full form, not recurrent",
        "load_path=no.pt": "load_path=no.pt is not a file; give a checkpoint or omit load_path",
        "load_path=no.pt model.pretrained_checkpoint=it": "both name what to start from; omit one",
        "fsdp_config.sharding_strategy=FULL_SHARD": "algorithms.ema averages whole weights, which fsdp_config shards",
    }
    for number, (override, words) in enumerate(mistakes.items()):
        with pytest.raises(UserError) as error:
            vision.main([str(config_file), *override.split(" "), f"save_folder={tmp_path / str(number)}"])
        assert words in str(error.value), override


def test_frozen_decays_stay_as_they_were(tmp_path, write_config):
    config = write_config(tmp_path, max_duration="2ba", save_interval="1ba", freeze=["attention.decay"])
    vision.main([str(config)])
    task = Vision(load_config(VisionConfig, "vision.py", "", [str(config)]))
    reproducibility.seed_all(task.config.seed)  # as before the run
    model = task.build_model(None).model
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen and all("attention.decay" in name for name in frozen)
    after = torch.load(tmp_path / "run" / "latest-rank0.pt", weights_only=False)["state"]["model"]
    for name, before in model.named_parameters():
        assert torch.equal(after[f"model.{name}"], before) == (name in frozen), name


def test_distillation_from_a_run(finished, tmp_path, write_config):
    _, teacher = finished
    for kind, token in (("hard", True), ("soft", False)):
        folder = tmp_path / kind
        folder.mkdir()
        distillation = {"teacher": str(teacher / "latest-rank0.pt"), "kind": kind}
        model = {**MODEL, "distillation_token": token}
        vision.main([str(write_config(folder, distillation=distillation, model=model, max_duration="2ba"))])
        read = read_checkpoint(folder / "run" / "latest-rank0.pt")
        assert ("distillation_classifier.weight" in read.weights) == token
        assert not any("teacher" in name for name in read.weights)
