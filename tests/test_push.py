"""`hub.py push` against a small Hub of the tests' own, and the model loaded back from there by its name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from src import hub as ours
from tests.conftest import assert_one_sentence, environment, run
from tests.fake_hub import FakeHub, serve

REPO = "lions/small-cat"


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_checkpoint) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    checkpoint = write_checkpoint(folder / "checkpoint.pt")
    ours.export(checkpoint, folder / "my-model")
    return checkpoint, folder / "my-model"


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "my-model"))


@pytest.fixture
def fake():
    with serve() as hub:
        yield hub


def push(fake: FakeHub, folder: Path, *options: object, token: str | None = FakeHub.token, repo: str = REPO):
    changes = {"HF_ENDPOINT": fake.url, "HF_HUB_DISABLE_XET": "1", **({} if token is None else {"HF_TOKEN": token})}
    return run("src/hub.py", "push", "--folder", folder, "--repo_id", repo, *options, **changes)


def test_a_pushed_folder_is_loaded_back_by_name_in_plain_transformers(fake, folder, tmp_path):
    (folder / "README.md").write_text("A card edited by hand.")
    result = push(fake, folder)
    assert result.returncode == 0, result.stderr
    assert f"{fake.url}/{REPO}" in result.stdout
    stored = fake.repos[REPO]["main"]
    assert stored == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert fake.private == {REPO: False}

    program = f"""
import torch, transformers
model = transformers.AutoModelForMaskedLM.from_pretrained("{REPO}", trust_remote_code=True).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained("{REPO}", trust_remote_code=True)
local = transformers.AutoModelForMaskedLM.from_pretrained({str(folder)!r}, trust_remote_code=True).eval()
batch = tokenizer("the small cat sees a red house .", return_tensors="pt")
with torch.no_grad():
    print(torch.equal(model(**batch).logits, local(**batch).logits))
"""
    changes = {"HF_ENDPOINT": fake.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, env=environment(**changes), capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr


def test_a_push_may_be_repeated_private_and_to_a_branch(fake, folder):
    for _ in range(2):
        assert push(fake, folder, "--private", "--revision", "step-1200").returncode == 0
    assert fake.private == {REPO: True}
    assert fake.repos[REPO]["main"] == {}
    assert "model.safetensors" in fake.repos[REPO]["step-1200"]
    assert len(fake.uploads) == 1  # the weights were there the second time


def test_a_push_that_broke_off_goes_on_without_sending_the_weights_again(fake, folder):
    fake.fail_commits = 10
    assert_one_sentence(push(fake, folder), fake.url, "push again")
    fake.fail_commits = 0
    assert push(fake, folder).returncode == 0
    assert len(fake.uploads) == 1


def test_without_a_token_or_with_one_that_may_not_write_nothing_is_sent(fake, folder):
    assert_one_sentence(push(fake, folder, token=None), "HF_TOKEN")
    assert_one_sentence(push(fake, folder, token="hf_other"), REPO, "HF_TOKEN")
    assert not fake.repos and not fake.uploads


def test_a_hub_that_cannot_be_reached_and_a_name_that_cannot_be(fake, folder):
    nowhere = FakeHub()
    nowhere.url = "http://127.0.0.1:9"
    assert_one_sentence(push(nowhere, folder), "127.0.0.1:9", "reached")
    assert_one_sentence(push(fake, folder, repo="a/b/c"), "--repo_id a/b/c")


def test_a_folder_that_changed_since_export_is_pushed_only_if_it_is_still_the_checkpoint(fake, made, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "chunk_size": 64}))
    assert_one_sentence(push(fake, folder), "config.json", "--checkpoint")
    assert not fake.repos
    assert push(fake, folder, "--checkpoint", made[0]).returncode == 0

    (folder / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 0.5}))
    assert_one_sentence(push(fake, folder, "--checkpoint", made[0]), "differ")


def test_what_is_no_folder_of_export_is_refused(fake, folder, tmp_path):
    assert_one_sentence(push(fake, tmp_path / "nowhere"), "nowhere", "not there")
    (folder / "proof.json").unlink()
    assert_one_sentence(push(fake, folder), "proof.json", "--checkpoint")


def test_a_link_out_of_the_folder_is_not_followed(fake, made, folder, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    assert_one_sentence(push(fake, folder, "--checkpoint", made[0]), "notes.txt", "link")
    assert not fake.repos
