"""Files that commit 7cc0584 wrote (tests/fixtures): today's commands resume, report, export, verify and load them."""

import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import plain
import pytest
import torch
import yaml
from conftest import environment, run, snapshot
from safetensors.torch import load_file

from tests.fake_hub import FakeHub, serve

FIXTURES = Path(__file__).with_name("fixtures")
# Another processor sums in another order.
LOSS = {"rel": 1e-4}
WEIGHTS = {"rtol": 0, "atol": 1e-3}
TEXT = "--data_files corpus.jsonl --val_fraction 0.2"
ROWS = f"{TEXT} --tokenizer tokenizer --concat_tokens 32 --num_workers 1 --size_limit 2048"
# What a user could type after each command.
OPTIONS = {
    "main": "--print_config",
    "glue": "--print_config",
    "glue report": "--out --resamples",
    "src.convert_dataset": "--dataset --data_files --data_subset --splits --out_root --text_column --stdin_format "
    "--one_document_per_file --val_fraction --tokenizer --concat_tokens --max_seq_len --num_workers --compression "
    "--size_limit --overwrite",
    "src.train_tokenizer": "--data_files --out --vocab_size --text_column --lowercase --no-lowercase",
    "src.hub export": "--checkpoint --out --glue",
    "src.hub verify": "--checkpoint --folder --tokenizer --python",
    "src.hub push": "--folder --repo_id --checkpoint --tokenizer --private --revision",
    "src.hub import": "--checkpoint --out --tokenizer",
}
PLAIN = """
import json, sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

expected = json.load(open("expected/logits.json"))
ids = AutoTokenizer.from_pretrained("my-model")(expected["texts"], padding=True, return_tensors="pt")
assert ids["input_ids"].tolist() == expected["input_ids"]
model = AutoModelForMaskedLM.from_pretrained("my-model", trust_remote_code=True).eval()
with torch.no_grad():
    logits = model(**ids).logits[:, :3]
torch.testing.assert_close(logits, torch.tensor(expected["logits"]), atol=1e-5, rtol=1e-5)
assert pipeline("fill-mask", model="my-model", trust_remote_code=True)(expected["texts"][0])
"""


def copied(folder: Path) -> Path:
    shutil.copytree(FIXTURES, folder, symlinks=True, dirs_exist_ok=True)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A copy of the fixtures as the current folder."""
    monkeypatch.chdir(copied(tmp_path))
    return tmp_path


def command(module: str, *arguments: str) -> None:
    """A command in this process: "main", "glue", "src.hub", …"""
    importlib.import_module(module).main(list(arguments))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in snapshot(folder).items() if not name.endswith(".lock")}


def assert_same_training(folder: Path, name: str) -> None:
    """A resumed run has the metrics and weights that the earlier commit gave it."""
    found = lines(folder / "metrics.jsonl")
    found = [line for line in found if line.get("changed", {}).keys() != {"max_duration"}]  # earlier ones lack these
    expected = lines(Path(f"expected/{name}-metrics.jsonl"))
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for new, old in zip(found, expected):
        for key in ("samples", "lr", "padding", "padding_without_packing"):
            assert new.get(key) == (pytest.approx(old[key]) if key in old else None)
        new, old = ({**line, **line.get("eval", {})} for line in (new, old))
        for key in old.keys() & {"loss", "eval/LanguageCrossEntropy"}:
            assert new[key] == pytest.approx(old[key], **LOSS)
    weights = torch.load(folder / "latest-rank0.pt", weights_only=False)["state"]["model"]
    for tensor, values in load_file(f"expected/{name}-weights.safetensors").items():
        torch.testing.assert_close(weights[tensor], values, **WEIGHTS)


# Commands and keys


@pytest.mark.parametrize("words", OPTIONS, ids=OPTIONS.keys())
def test_every_option_is_still_known(words, capsys):
    module, *subcommand = words.split()
    with pytest.raises(SystemExit) as end:
        command(module, *subcommand, "--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert [option for option in OPTIONS[words].split() if option not in text] == []


def within(found: object, expected: object) -> object:
    """What was found, without the keys that are new since, at any depth."""
    if not (isinstance(found, dict) and isinstance(expected, dict) and expected):
        return found
    return {name: within(value, expected[name]) for name, value in found.items() if name in expected}


@pytest.mark.parametrize(("module", "config"), [("main", "stopped"), ("glue", "finetune")])
def test_every_key_keeps_its_name_default_and_meaning(here, module, config, capsys):
    """Of the config that was typed, and of the resolved one that a run keeps, which can be given too."""
    expected = yaml.safe_load(Path(f"keys-{module}.yaml").read_text())
    for path in (f"{config}.yaml", f"keys-{module}.yaml"):
        with pytest.raises(SystemExit) as end:
            command(module, path, "--print_config")
        assert end.value.code in (0, None)
        found = yaml.safe_load(capsys.readouterr().out)
        assert within(found, expected) == expected


# Tokenizers and shards


def test_the_same_text_gives_the_same_tokenizer(here):
    command("src.train_tokenizer", *"--data_files corpus.jsonl --vocab_size 256 --out again".split())
    assert contents(here / "again") == contents(here / "tokenizer")


def splits(folder: Path) -> dict[str, object]:
    """The files of splits; split.json without what is new since."""
    files = contents(folder)
    return {
        name: {key: value for key, value in json.loads(file).items() if key != "command"}
        if name.endswith("split.json")
        else file
        for name, file in files.items()
    }


def test_the_same_text_gives_the_same_shards(here):
    command("src.convert_dataset", *TEXT.split(), *"--size_limit 8192 --out_root again".split())
    assert splits(here / "again") == splits(here / "shards")


def test_an_unfinished_conversion_resumes_to_the_same_shards(here):
    unfinished = here / "unfinished" / ".train.unfinished"
    ((name, _, changed),) = json.loads((unfinished / "progress.json").read_text())["stamps"]
    os.utime(name, ns=(changed, changed))  # git does not keep it
    complete = {path.name: path.stat().st_ino for path in unfinished.glob("*.mds")}
    assert len(complete) == 2
    command("src.convert_dataset", *ROWS.split(), "--out_root", "unfinished")
    assert splits(here / "unfinished") == splits(here / "tokens")
    written = {path.name: path.stat().st_ino for path in (here / "unfinished" / "train").glob("*.mds")}
    assert len(written) == 3 and complete.items() < written.items()  # the first two were not written again


# Pretraining


def test_a_stopped_run_resumes_to_the_same_weights(here, capsys):
    command("main", "stopped.yaml")
    assert_same_training(here / "stopped", "stopped")
    summary = json.loads((here / "stopped" / "summary.json").read_text())
    assert f"{summary['after']['loss']:.3f}" in capsys.readouterr().out


def test_a_finished_run_reports_and_is_left_unchanged(here, capsys):
    before = contents(here / "finished")
    command("main", "finished.yaml")
    out = capsys.readouterr().out
    summary = json.loads((here / "finished" / "summary.json").read_text())
    assert f"{summary['before']['loss']:.3f}" in out and f"{summary['after']['loss']:.3f}" in out
    assert "latest-rank0.pt" in out
    assert contents(here / "finished") == before


def test_a_finished_run_is_extended_with_its_own_config(here):
    command("main", "finished/config.yaml", "max_duration=16ba")
    assert_same_training(here / "finished", "finished")


def test_pretraining_starts_from_a_hub_folder(here):
    start = ["model.pretrained_checkpoint=my-model", "run_name=again", "max_duration=2ba"]
    command("main", "finished.yaml", *start)
    summaries = [json.loads((here / name / "summary.json").read_text()) for name in ("finished", "again")]
    assert summaries[1]["before"]["loss"] == pytest.approx(summaries[0]["after"]["loss"], **LOSS)


# Hub folders


def test_a_hub_folder_loads_in_plain_transformers_with_its_own_code(here):
    own = environment(HF_HUB_OFFLINE="1", HF_MODULES_CACHE=str(here / "modules"))
    done = plain.run([sys.executable, "-c", PLAIN], cwd=here, env=own)
    assert done.returncode == 0, done.stderr


def test_a_hub_folder_verifies_and_its_checkpoint_exports_again(here, capsys):
    command("src.hub", *"verify --checkpoint finished/latest-rank0.pt --folder my-model".split())
    command("src.hub", *"export --checkpoint finished/latest-rank0.pt --out again --glue finetuned".split())
    differences = [float(number) for number in re.findall(r"largest difference (\S+)\)", capsys.readouterr().out)]
    assert differences == [pytest.approx(0, abs=1e-6), 0]  # the folder's own code may round in another way than today's
    old, new = (load_file(here / name / "model.safetensors") for name in ("my-model", "again"))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    scores = json.loads((here / "finetuned" / "report.json").read_text())["tasks"]
    card = (here / "again" / "README.md").read_text()
    assert all(f"{100 * task['mean']:.2f}" in card for task in scores)


def test_a_fine_tuned_checkpoint_exports_with_its_labels(here):
    checkpoint = "finetuned/jobs/season-19/latest-rank0.pt"
    command("src.hub", "export", "--checkpoint", checkpoint, "--out", "classifier")
    labels = json.loads((here / "classifier" / "config.json").read_text())["id2label"]
    assert labels == {"0": "spring", "1": "summer", "2": "winter"}


def test_a_hub_folder_is_pushed_with_its_stored_proof(here, monkeypatch):
    with serve() as hub:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", FakeHub.token)
        command("src.hub", *"push --folder my-model --repo_id lions/old".split())
        pushed = hub.repos["lions/old"]["main"]
    kept = contents(here / "my-model")
    assert b'model="lions/old"' in pushed["README.md"] and b'model="my-model"' in kept["README.md"]
    assert {**pushed, "README.md": kept["README.md"]} == kept


# Fine-tuning


def scores(folder: Path) -> list:
    rows = json.loads((folder / "report.json").read_text())["tasks"]
    return [(row["task"], row["metrics"], row["folders"], list(row["seeds"])) for row in rows], [
        score for row in rows for score in (row["mean"], row["majority"], *row["seeds"].values())
    ]


def logits(job: Path, split: str) -> torch.Tensor:
    return torch.tensor([line["logits"] for line in lines(job / f"predictions-{split}.jsonl")])


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory) -> Path:
    """A copy of the fixtures where the command of the run was given again, which lacks one of four results."""
    here = copied(tmp_path_factory.mktemp("finetuned"))
    done = run("glue.py", "finetune.yaml", cwd=here, timeout=300)
    assert done.returncode == 0, done.stderr
    return here


def test_only_jobs_without_a_result_are_run(finetuned):
    old, new = (snapshot(place / "finetuned" / "jobs") for place in (FIXTURES, finetuned))
    assert {name.split("/")[0] for name in new if new[name][0] != old.get(name, (None,))[0]} == {"rte-20"}
    (facts, values), (old_facts, old_values) = scores(finetuned / "finetuned"), scores(FIXTURES / "finetuned")
    assert facts == old_facts
    assert values == pytest.approx(old_values, abs=1e-6)
    assert contents(finetuned / "finetuned" / "submission") == contents(FIXTURES / "finetuned" / "submission")
    for split in ("dev", "test"):
        found, expected = (logits(place / "finetuned" / "jobs" / "rte-20", split) for place in (finetuned, FIXTURES))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_reports_are_read_and_compared(finetuned, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "finetuned", "old", symlinks=True)
    command("glue", "report", "old")
    assert all(f"{100 * score:.2f}" in capsys.readouterr().out for score in scores(Path("old"))[1][:1])
    shutil.copy(finetuned / "finetuned" / "jobs" / "rte-20" / "result.json", "old/jobs/rte-20")
    command("glue", "report", "old", str(finetuned / "finetuned"), "--out", "compare", "--resamples", "100")
    compared = json.loads(Path("compare/compare.json").read_text())["differences"]["finetuned"]
    assert compared.keys() == {"rte", "season", "length"}
    assert all(abs(difference[key]) < 1e-6 for difference in compared.values() for key in ("mean", "low", "high"))


def test_fine_tuning_starts_from_a_hub_folder(finetuned):
    """Its weights are those of the checkpoint, so the result is the same, with the dropout of before the kernel."""
    changes = ["starting_checkpoint_load_path=my-model", "save_folder=from-hub", "tasks_to_run=[season]"]
    done = run("glue.py", "finetune.yaml", *changes, cwd=finetuned, timeout=300, LION_NATIVE="0")
    assert done.returncode == 0, done.stderr
    found, expected = (
        logits(finetuned / name / "jobs" / "season-19", "validation") for name in ("from-hub", "finetuned")
    )
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
