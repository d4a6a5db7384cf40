"""`hub.py push` and `import` by name against a small Hub of the tests' own, and the model loaded back from there."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from conftest import PARITY, assert_one_sentence, needs_reference, run, tokens_of

from src.errors import UserError
from src.publish import commands as hub
from src.publish import folder as hub_folder
from tests.fake_hub import FakeHub, serve

REPO = "lions/small-cat"
import_published = partial(hub.export, published=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory, write_checkpoint) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    checkpoint = write_checkpoint(folder / "checkpoint.pt")
    hub.export(checkpoint, folder / "my-model")
    return checkpoint, folder / "my-model"


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "my-model"))


@pytest.fixture
def fake(monkeypatch):
    """A Hub that this process talks to, with a token that may write."""
    with serve() as hub:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", FakeHub.token)
        yield hub


def as_a_user(fake: FakeHub, folder: Path, *options: object, **changes: str):
    settings = {"HF_ENDPOINT": fake.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": FakeHub.token, **changes}
    return run("src/hub.py", "push", "--folder", folder, "--repo_id", REPO, *options, **settings)


def test_a_pushed_folder_is_on_the_hub_and_its_card_loads_it_by_name(fake, folder, tmp_path):
    (folder / "README.md").write_text((folder / "README.md").read_text() + "A line by hand.\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = as_a_user(fake, folder, HF_HOME=str(tmp_path / "home"))
    assert result.returncode == 0, result.stderr
    assert f"{fake.url}/{REPO}" in result.stdout
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    pushed = {**fake.repos[REPO]["main"], "README.md": before["README.md"]}
    assert pushed == before
    assert fake.private == {REPO: False}
    card = fake.repos[REPO]["main"]["README.md"].decode()
    assert f'pipeline("fill-mask", model="{REPO}", trust_remote_code=True)' in card
    assert card.endswith("A line by hand.\n")
    assert FakeHub.token not in result.stdout + result.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or FakeHub.token.encode() not in path.read_bytes(), path


def test_a_push_may_be_repeated_and_go_to_a_private_repository_or_a_branch(fake, folder):
    for _ in range(2):
        hub.push(folder, REPO, private=True, revision="step-1200")
    assert fake.private == {REPO: True}
    assert fake.repos[REPO]["main"] == {}
    assert "model.safetensors" in fake.repos[REPO]["step-1200"]
    assert len(fake.uploads) == 1  # the weights were there the second time


def test_the_card_in_a_second_repository_loads_that_one(fake, folder):
    for name in (REPO, "lions/second"):
        hub.push(folder, name)
    assert f'model="{REPO}"' in fake.repos[REPO]["main"]["README.md"].decode()
    assert 'model="lions/second"' in fake.repos["lions/second"]["main"]["README.md"].decode()


def test_a_name_without_an_organization_gets_the_users(fake, folder):
    hub.push(folder, "small-cat", revision="step-1200")
    assert fake.repos.keys() == {f"{FakeHub.user}/small-cat"}
    card = fake.repos[f"{FakeHub.user}/small-cat"]["step-1200"]["README.md"].decode()
    assert f'model="{FakeHub.user}/small-cat"' in card


def test_an_interrupted_push_resumes_without_uploading_the_weights_again(fake, folder):
    fake.fail_commits = 10
    with pytest.raises(UserError, match=rf"{fake.url} could not be reached .*push again") as broken:
        hub.push(folder, REPO)
    assert FakeHub.token not in str(broken.value)
    fake.fail_commits = 0
    hub.push(folder, REPO)
    assert len(fake.uploads) == 1


def test_without_a_token_that_may_write_nothing_is_uploaded(fake, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(UserError, match=rf"refused {REPO} \(the token is missing or not valid\).*HF_TOKEN") as refused:
        hub.push(folder, REPO)
    assert "hf_other" not in str(refused.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="HF_TOKEN"):
        hub.push(folder, REPO)
    assert not fake.repos
    assert not fake.uploads


def test_an_unreachable_hub_is_reported(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", FakeHub.token)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 could not be reached"):
        hub.push(folder, REPO)


def test_an_offline_hub_is_reported(fake, folder):
    assert_one_sentence(as_a_user(fake, folder, HF_HUB_OFFLINE="1"), REPO, "HF_HUB_OFFLINE")


def test_an_invalid_name_is_refused(fake, folder):
    with pytest.raises(UserError, match=r"a/b/c cannot be used: Repo id must be in the form"):
        hub.push(folder, "a/b/c")


def test_a_folder_changed_since_export_is_pushed_only_if_it_still_matches_the_checkpoint(fake, made, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "chunk_size": 64}))
    with pytest.raises(
        UserError, match=r"config\.json changed, were added or were removed since export; give the --checkpoint"
    ):
        hub.push(folder, REPO)
    assert not fake.repos
    hub.push(folder, REPO, made[0])
    hub.push(folder, REPO)  # with the new proof

    (folder / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 0.5}))
    with pytest.raises(UserError, match="differ"):
        hub.push(folder, REPO, made[0])


@pytest.mark.parametrize("spoil", ["unlink", "write"])
def test_a_missing_or_new_file_is_named(fake, folder, spoil):
    name = {"unlink": "linear_attention.py", "write": "notes.txt"}[spoil]
    (folder / name).unlink() if spoil == "unlink" else (folder / name).write_text("new")
    with pytest.raises(UserError, match=f"{name} changed, were added or were removed since export"):
        hub.push(folder, REPO)
    assert not fake.repos


def test_a_folder_that_export_did_not_write_is_refused(fake, folder, tmp_path):
    with pytest.raises(UserError, match="nowhere is not a directory"):
        hub.push(tmp_path / "nowhere", REPO)
    (folder / "proof.json").write_text("[]")
    with pytest.raises(UserError, match=r"no valid proof\.json.*--checkpoint"):
        hub.push(folder, REPO)


def test_a_link_out_of_the_folder_is_not_followed(fake, made, folder, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match=r"notes\.txt is a link"):
        hub.push(folder, REPO, made[0])
    assert not fake.repos


# import by name


@needs_reference
def test_a_published_checkpoint_is_imported_from_the_hub_and_pushed_again(
    fake, tmp_path, tokenizer_folder, monkeypatch
):
    data = (PARITY / "legacy-nova.pt").read_bytes()
    fake.repos["authors/model-mlm"] = {"main": {"README.md": b"theirs", "step-1.pt": data}}
    out = tmp_path / "my-model"
    import_published("authors/model-mlm", out, tokenizer=str(tokenizer_folder))
    assert tokens_of(out) == tokens_of(tokenizer_folder)
    assert "authors/model-mlm" in (out / "README.md").read_text()
    hub.push(out, REPO)
    assert fake.repos[REPO]["main"]["model.safetensors"] == (out / "model.safetensors").read_bytes()

    compared = []
    monkeypatch.setattr(hub_folder, "verify", lambda checkpoint, *_: compared.append(checkpoint) or 0.0)
    hub.verify("authors/model-mlm", out, str(tokenizer_folder))
    assert compared[0].published == "authors/model-mlm"
    assert compared[0].load_tokenizer().get_vocab() == tokens_of(out)


def test_a_name_with_no_or_several_checkpoints_is_refused(fake, tmp_path):
    files = {"README.md": b""}
    fake.repos["authors/none"] = {"main": files}
    fake.repos["authors/two"] = {"main": {**files, "a.pt": b"not a", "b.pt": b"checkpoint"}}
    for name, words in (
        ("authors/none", "no checkpoints"),
        ("authors/two", r"authors/two/FILE: a\.pt, b\.pt"),
        ("authors/two/a.pt", "not a readable checkpoint"),
        ("authors/nobody", "does not exist or is private"),
        ("runs/lost/latest-rank0.pt", "is not a file"),
    ):
        with pytest.raises(UserError, match=words):
            import_published(name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
