"""A task's inputs as shards: what they hold, a model pretrained on them, and one fine-tuned from it."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, assert_one_sentence, run, tokens_of
from test_lra_arrays import in_process
from test_lra_jobs import MODEL, SIZES
from test_lra_sources import examples, write_aan, write_pathfinder

import lra
from src.config import load
from src.data.streaming import StreamingSamples
from src.errors import UserError
from src.lra import make, shards, sources
from src.lra.listops import VOCABULARY
from src.lra.tasks import FIRST, LRA, SUITE, LraConfig
from src.lra.training import build_settings, read_start

TINY = {**MODEL, "long_reach": None, "channel_decays": True}


@pytest.fixture(scope="module")
def lra_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lra")
    make.main(["listops", "--out", str(folder), *SIZES])
    return write_pathfinder(write_aan(folder), 20)


@pytest.fixture(scope="module")
def listops(tmp_path_factory, lra_dir) -> Path:
    out = tmp_path_factory.mktemp("shards") / "listops"
    shards.main(["listops", "--lra_dir", str(lra_dir), "--out", str(out)])
    return out


def rows(folder: Path) -> list[list[int]]:
    return [sample["tokens"].tolist() for sample in StreamingSamples(local=str(folder), shuffle=False, batch_size=1)]


@pytest.mark.parametrize("options", [{"split": "in_order"}, {"split_seed": 3}])
def test_shards_are_split_as_the_task_is(lra_dir, tmp_path, options):
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    shards.main(["pathfinder", "--lra_dir", str(lra_dir), "--out", str(tmp_path / "out"), *given])
    task = replace(LRA["pathfinder"], **options)
    found = rows(tmp_path / "out/train")
    assert found == numbers(sources.read(task, str(lra_dir), "train"))
    assert found != numbers(examples("pathfinder", lra_dir, "train"))


def numbers(found: list, part: int = 0) -> list[list[int]]:
    return [[token + FIRST for token in parts[part]] for parts, _ in found]


def test_shards_hold_each_training_input_numbered_after_the_special_tokens(listops, lra_dir):
    for folder, split in (("train", "train"), ("val", "validation")):
        assert rows(listops / folder) == numbers(examples("listops", lra_dir, split))
    assert sorted(path.name for path in listops.iterdir() if path.is_dir()) == ["tokenizer", "train", "val"]
    vocabulary = tokens_of(listops / "tokenizer")
    assert [vocabulary[name] for name in VOCABULARY] == list(range(FIRST, FIRST + 15)) and len(vocabulary) == 20
    about = json.loads((listops / "train/split.json").read_text())
    assert about["samples"] == 64 and about["source"]["origin"].startswith("generated, seed 0, unlike the release")


def test_both_texts_of_a_pair_and_the_pixels_of_an_image_are_rows(lra_dir, tmp_path):
    for name in ("retrieval", "pathfinder"):
        shards.main([name, "--lra_dir", str(lra_dir), "--out", str(tmp_path / name)])
        assert len(tokens_of(tmp_path / name / "tokenizer")) == 256 + FIRST
    pairs = examples("aan", lra_dir)
    assert rows(tmp_path / "retrieval/train") == [[t + FIRST for t in part] for parts, _ in pairs for part in parts]
    assert rows(tmp_path / "pathfinder/val") == numbers(examples("pathfinder", lra_dir, "validation"))
    assert np.array(rows(tmp_path / "pathfinder/train")).shape == (16, 1024)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, listops) -> Path:
    """The checkpoint of a tiny variant of the recipe, after a few steps of main.py."""
    folder = tmp_path_factory.mktemp("pretrained")
    config = {
        "inherit": str(ROOT / "yamls/lra/pretrain/listops.yaml"), "data_local": str(listops), "model": TINY,
        "max_duration": "3ba", "eval_interval": "3ba", "save_interval": "3ba", "global_train_batch_size": 8,
        "device_train_microbatch_size": 8, "device_eval_batch_size": 8, "train_loader": {"num_workers": 0},
        "eval_loader": {"num_workers": 0}, "device": "cpu", "save_folder": str(folder / "run"),
    }  # fmt: skip
    (folder / "pretrain.yaml").write_text(yaml.safe_dump(config))
    done = run("main.py", folder / "pretrain.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run/latest-rank0.pt"


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, map_location="cpu", weights_only=False)["state"]["model"]


def config_of(checkpoint: Path, folder: Path = Path("unused"), **changes) -> list[str]:
    given = {
        "save_folder": str(folder), "base_run_name": "tuned", "device": "cpu", "tasks_to_run": ["listops"],
        "starting_checkpoint_load_path": str(checkpoint), "save_finetuned_checkpoints": True, **changes,
    }  # fmt: skip
    return [str(ROOT / "yamls/lra/lion-s.yaml"), *(f"{name}={json.dumps(value)}" for name, value in given.items())]


def test_a_run_starts_from_the_pretrained_encoder(pretrained, lra_dir, tmp_path):
    still = {"listops": {"epochs": 1, "lr": 0.0, "batch_size": 32}}
    done = run("lra.py", *config_of(pretrained, tmp_path / "run", lra_dir=str(lra_dir), tasks=still))
    assert done.returncode == 0, done.stderr
    assert f"(ListOps), from {pretrained}, on cpu" in done.stderr
    before, after = tensors(pretrained), tensors(tmp_path / "run/jobs/listops-1/latest-rank0.pt")
    shared = [name for name in before if name.startswith("model.lion.")]
    assert len(shared) > 10 and shared == [name for name in after if name.startswith("model.lion.")]
    assert all(torch.equal(before[name], after[name]) for name in shared)
    settings = json.loads((tmp_path / "run/jobs/listops-1/result.json").read_text())["settings"]
    assert settings["model"]["hidden_size"] == 16 and settings["model"]["channel_decays"]
    refused = run("lra.py", *config_of("null", tmp_path / "run", lra_dir=str(lra_dir), tasks=still)[:-1],
                  "starting_checkpoint_load_path=null")  # fmt: skip
    assert_one_sentence(refused, "has results for weights", "choose another save_folder")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            {"text": {}},
            "starting_checkpoint_load_path: vocab_size=24, but Text needs 264; use a model that main.py pretrained",
        ),
        (
            {"pathfinder": {}},
            "a pretrained model reads tokens, but this task reads values; set tasks.pathfinder.inputs=tokens",
        ),
        ({"pathfinder": {"inputs": "tokens"}}, "vocab_size=24, but Pathfinder needs 264"),
        ({"listops": {"vocabulary": 30}}, "vocab_size=24, but ListOps needs 40"),
    ],
)
def test_a_checkpoint_of_another_vocabulary_or_kind_of_input_is_refused(pretrained, task, words):
    config = load(LraConfig, "lra.py", config_of(pretrained))
    stored, weights = read_start(config)
    assert stored["vocab_size"] == 24 and weights
    (chosen,) = SUITE.select([*task], task, 1)
    with pytest.raises(UserError) as error:
        build_settings(chosen, config, stored)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_config_overrides_the_model_of_a_checkpoint_and_the_sizes_of_the_task_do_not(pretrained):
    config = load(LraConfig, "lra.py", config_of(pretrained, model={"normalize_rows": False}))
    stored, _ = read_start(config)
    settings = build_settings(LRA["listops"], config, stored)
    assert stored["normalize_rows"] and not settings.get("normalize_rows") and settings["hidden_size"] == 16
    (task,) = SUITE.select(["listops"], given := {"listops": {"model": {"attention_form": "chunkwise"}}}, 1)
    config = load(LraConfig, "lra.py", config_of(pretrained, tasks=given))
    settings = build_settings(task, config, stored)
    assert settings["attention_form"] == "chunkwise" and settings["hidden_size"] == 16


def test_another_mixer_than_the_checkpoints_is_refused(pretrained, lra_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("src.jobs.jobs.start_server", lambda *_: None)
    arguments = config_of(pretrained, tmp_path / "run", lra_dir=str(lra_dir))
    with pytest.raises(UserError, match="decay"):
        lra.main([str(ROOT / "yamls/lra/lion-d.yaml"), *arguments[1:]])


def test_pixels_as_tokens_take_a_model_of_pixels(pretrained):
    config = load(LraConfig, "lra.py", config_of(pretrained))
    (task,) = SUITE.select(["pathx"], {"pathx": {"inputs": "tokens"}}, 1)
    stored = {**read_start(config)[0], "vocab_size": 264}
    settings = build_settings(task, config, stored)
    assert not settings["reads_values"] and settings["vocab_size"] == 264 and settings["hidden_size"] == 16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["listops", "--lra_dir", "nowhere"], ["lra_dir: nowhere is not a directory"]),
        (["listops"], ["lra_dir is not set"]),
        (["pathx", "--lra_dir", "{}"], ["pathfinder128", "does not exist"]),
    ],
)
def test_missing_files_are_one_sentence_and_write_nothing(lra_dir, tmp_path, arguments, words):
    with pytest.raises(UserError) as error:
        shards.main([*(value.format(lra_dir) for value in arguments), "--out", str(tmp_path / "out")])
    assert all(word in str(error.value) for word in words)
    assert not (tmp_path / "out").exists()


def test_existing_shards_are_not_replaced(listops, lra_dir):
    files = {path: path.stat().st_mtime_ns for path in listops.rglob("*")}
    done = run("lra.py", "shards", "listops", "--lra_dir", lra_dir, "--out", listops)
    assert_one_sentence(done, f"--out: {listops / 'train'} exists; remove it, or choose another folder")
    assert {path: path.stat().st_mtime_ns for path in listops.rglob("*")} == files


def test_a_killed_command_leaves_nothing_under_the_final_names_and_works_again(listops, lra_dir, tmp_path):
    arguments = ["listops", "--lra_dir", str(lra_dir), "--out", str(tmp_path / "out")]

    def killed() -> None:
        write = shards.write_split

        def stop(task, lra_dir, split, folder, summary) -> None:
            write(task, lra_dir, split, folder, summary)
            if split == "validation":
                os.kill(os.getpid(), signal.SIGKILL)

        shards.write_split = stop
        shards.main(arguments)

    assert in_process(killed) == -signal.SIGKILL
    assert not any((tmp_path / "out" / name).exists() for name in ("train", "val", "tokenizer"))
    assert (tmp_path / "out/.unfinished/train").exists()
    shards.main(arguments)
    assert not (tmp_path / "out/.unfinished").exists()
    for name in ("train", "val"):
        assert (tmp_path / "out" / name / "shard.00000.mds").read_bytes() == (
            listops / name / "shard.00000.mds"
        ).read_bytes()


def test_every_task_has_a_recipe_to_pretrain():
    assert {path.stem for path in (ROOT / "yamls/lra/pretrain").glob("*.yaml")} == {*LRA, "recipe"}
