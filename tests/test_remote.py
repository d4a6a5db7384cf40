"""`save_remote` and checkpoints in an object store, against a local server that speaks S3, and a folder."""

import itertools
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm

import embed
import main
from src import files
from src.checkpoints import remote
from src.checkpoints.reading import read_pretrained
from src.embed import encode
from src.errors import RunFailed, UserError
from src.publish import commands
from src.training import uploads
from src.training.checkpointing import CheckpointWriter, latest_valid_checkpoint

pytestmark = pytest.mark.usefixtures("shared_memory_freed")

BUCKET = "bucket"
SHORT = {"max_duration": "4ba", "save_interval": "2ba", "eval_interval": "100ba", "loggers": {}, "eval_first": False}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = pytest.importorskip("moto.server", reason="moto, the local S3 server, is not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def s3(server, monkeypatch) -> remote.Store:
    """An empty folder of a bucket."""
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "S3_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(uploads, "PAUSES", (0.01,))
    monkeypatch.setenv(remote.FETCHED, "{}")
    client = boto3.client("s3", endpoint_url=server)
    client.create_bucket(Bucket=BUCKET)
    for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=found["Key"])
    return remote.Store(f"s3://{BUCKET}/runs/tiny", "save_remote")


@pytest.fixture(params=["s3", "folder"])
def store(request, tmp_path) -> remote.Store:
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return remote.Store(str(tmp_path / "remote"), "save_remote")


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=False)["state"]["model"]


@pytest.mark.slow
def test_a_machine_with_an_empty_folder_resumes_from_the_remote_one(store, tmp_path, write_config, caplog, capsys):
    config, run, options = write_config(tmp_path, **SHORT), tmp_path / "run", [f"save_remote={store.address}"]
    main.main([str(config), *options])
    expected = ["config.yaml", "curves.png", "ep0-ba2-rank0.pt", "ep0-ba4-rank0.pt", "latest-rank0.pt"]
    assert {*expected, "metrics.jsonl", "summary.json"} <= {*store.names()}
    shutil.rmtree(run)
    with caplog.at_level("INFO", logger="lion"):
        main.main([str(config), *options])  # it is finished
        assert "is already finished" in caplog.text
        shutil.rmtree(run)
        main.main([str(config), *options, "max_duration=6ba"])
    assert "resuming from step 4" in caplog.text
    assert "ep1-ba6-rank0.pt" in store.names() or "ep0-ba6-rank0.pt" in store.names()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()][:4] == [1, 2, 3, 4]
    with pytest.raises(UserError, match=rf"^save_remote: {store.address} holds a run that differs in seed"):
        main.main([str(config), *options, "max_duration=6ba", "seed=5", f"save_folder={tmp_path / 'other'}"])
    assert not (tmp_path / "other" / "config.yaml").exists()
    if store.client is not None:  # every command that reads a checkpoint takes its address
        newest = f"{store.address}/latest-rank0.pt"
        assert read_pretrained(newest, "model.pretrained_checkpoint").timestamp["batch"] == 6
        commands.export(newest, tmp_path / "my-model")
        start = [f"load_path={store.address}/ep0-ba4-rank0.pt", f"save_folder={tmp_path / 'third'}", "max_duration=6ba"]
        main.main([str(config), *start])
        a, b = weights(run / "latest-rank0.pt"), weights(tmp_path / "third" / "latest-rank0.pt")
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_what_a_killed_run_has_saved_is_uploaded(tmp_path, write_config):
    store = remote.Store(str(tmp_path / "remote"), "save_remote")
    config = write_config(tmp_path, **{**SHORT, "max_duration": "10000ba"})
    process = warm.start("main.py", config, f"save_remote={store.address}", output=tmp_path / "output")
    try:
        warm.wait_for(lambda: "latest-rank0.pt" in store.names(), process)
    finally:
        process.kill()
        process.join()
    uploads.restore(tmp_path / "new", store, -1, lambda stored: None)
    assert "run_name: tiny" in (tmp_path / "new" / "config.yaml").read_text()
    newest = latest_valid_checkpoint(tmp_path / "new")
    assert read_pretrained(str(newest), "KEY").timestamp["batch"] == remote.checkpoint_step(newest.name)


def test_an_address_is_downloaded_once_for_a_process_and_those_that_it_starts(s3, folder, monkeypatch):
    s3.upload(folder / "ep0-ba4-rank0.pt", "ep0-ba4-rank0.pt")
    address = f"{s3.address}/ep0-ba4-rank0.pt"
    path = remote.fetch(address, "KEY")
    monkeypatch.delattr(remote, "_download")
    assert remote.fetch(address, "KEY") == path
    assert json.loads(os.environ[remote.FETCHED]) == {address: str(path)}


def test_vectors_by_a_remote_model_are_recognized_by_the_next_process(s3, checkpoint, tmp_path, monkeypatch):
    s3.upload(checkpoint, "ep0-ba4-rank0.pt")
    (text := tmp_path / "a.txt").write_text("the king sees a dog\n")
    command = ["encode", f"{s3.address}/ep0-ba4-rank0.pt", "--data_files", str(text), "--out", str(tmp_path / "out")]
    embed.main(command)
    monkeypatch.setenv(remote.FETCHED, "{}")  # as it is there
    with monkeypatch.context() as patch:
        patch.delattr(encode, "write_all")
        embed.main(command)
    other = torch.load(checkpoint, weights_only=False)
    next(iter(other["state"]["model"].values())).add_(1)
    torch.save(other, tmp_path / "other.pt")
    s3.upload(tmp_path / "other.pt", "ep0-ba4-rank0.pt")  # as large, under the same name
    monkeypatch.setenv(remote.FETCHED, "{}")
    with pytest.raises(UserError, match="holds vectors of another model"):
        embed.main(command)


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (2, 4):
        torch.save({"step": step}, folder / f"ep0-ba{step}-rank0.pt")
    (folder / "latest-rank0.pt").symlink_to("ep0-ba4-rank0.pt")
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "summary.json").write_text('{"after": {"step": 4}}')
    (folder / "tensorboard").mkdir()
    (folder / "ep0-ba6-rank0.unfinished").write_text("part")
    return folder


def test_only_what_is_new_is_uploaded_in_an_order_that_a_kill_cannot_break(store, folder, monkeypatch):
    seen, upload = [], store.upload
    monkeypatch.setattr(store, "upload", lambda path, name: (seen.append(name), upload(path, name)))
    first = uploads.Uploads(folder, store)
    assert first.finish() is None
    small = ["config.yaml", "metrics.jsonl"]
    assert seen == [*small, "ep0-ba2-rank0.pt", "ep0-ba4-rank0.pt", "latest-rank0.pt", "summary.json"]
    assert store.names() == sorted(seen)
    torch.save({"step": 6}, folder / "ep0-ba6-rank0.pt")
    seen.clear()
    assert first.finish() is None
    assert seen == ["ep0-ba6-rank0.pt"]
    (folder / "ep0-ba2-rank0.pt").write_bytes(b"of another run")
    seen.clear()
    assert uploads.Uploads(folder, store).finish() is None
    assert seen == [*small, "ep0-ba2-rank0.pt", "latest-rank0.pt", "summary.json"]  # small files are not compared


def test_the_remote_latest_is_a_checkpoint_that_is_there(store, folder, tmp_path, monkeypatch):
    upload = store.upload

    def slow(path: Path, name: str) -> None:
        upload(path, name)
        if name == "ep0-ba4-rank0.pt":  # the run goes on meanwhile
            torch.save({"step": 6}, folder / "ep0-ba6-rank0.pt")
            files.link(folder / "latest-rank0.pt", "ep0-ba6-rank0.pt")

    monkeypatch.setattr(store, "upload", slow)
    sent = uploads.Uploads(folder, store)
    for newest in ("ep0-ba4-rank0.pt", "ep0-ba6-rank0.pt"):
        assert sent.finish() is None
        store.download("latest-rank0.pt", tmp_path / "latest-rank0.pt")
        assert files.follow(tmp_path / "latest-rank0.pt").name == newest


def test_a_checkpoint_is_kept_while_it_is_uploaded(folder, tmp_path):
    writer = CheckpointWriter(folder, "2ba", keep=1, uploads=SimpleNamespace(busy=folder / "ep0-ba2-rank0.pt"))
    assert writer._publish({"step": 6}, folder / "ep0-ba6-rank0.pt") is None
    assert sorted(path.name for path in folder.glob("ep*.pt")) == ["ep0-ba2-rank0.pt", "ep0-ba6-rank0.pt"]
    writer.uploads.busy = None
    assert writer._publish({"step": 8}, folder / "ep0-ba8-rank0.pt") is None
    assert sorted(path.name for path in folder.glob("ep*.pt")) == ["ep0-ba8-rank0.pt"]


def test_failed_uploads_are_tried_again_reported_and_never_raised(store, folder, monkeypatch, caplog):
    attempts, upload = [], store.upload

    def fail(path: Path, name: str) -> None:
        attempts.append(name)
        if len(attempts) < 5:
            raise ConnectionError("the network is down")
        upload(path, name)

    monkeypatch.setattr(uploads, "PAUSES", (0.01,))
    monkeypatch.setattr(store, "upload", fail)
    sent = uploads.Uploads(folder, store)
    sent.notify()
    with sent.changed:
        sent.changed.wait_for(lambda: sent.served)
    assert attempts == ["config.yaml"] * 2  # and no later file, of which a checkpoint would have no config
    assert "save_remote: config.yaml was not uploaded to" in caplog.text
    assert "(the network is down); training continues, and the next save tries again" in caplog.text
    assert sent.finish().startswith("config.yaml was not uploaded")
    assert sent.finish() is None
    assert len(store.names()) == 6


def test_a_folder_that_cannot_be_read_is_a_failed_upload(store, folder):
    sent = uploads.Uploads(folder, store)
    folder.rename(folder.with_name("moved"))
    sent.notify()
    with sent.changed:
        sent.changed.wait_for(lambda: sent.served)
    assert sent.failure == f"{folder} cannot be read (No such file or directory)"


def test_a_corrupt_remote_checkpoint_is_skipped(store, folder, tmp_path, caplog):
    newest = folder / "ep0-ba4-rank0.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert uploads.Uploads(folder, store).finish() is None
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "summary.json").write_text('{"after": {"step": 1}}')
    uploads.restore(tmp_path / "new", store, -1, lambda stored: None)
    assert (tmp_path / "new" / "latest-rank0.pt").resolve().name == "ep0-ba2-rank0.pt"
    assert "ep0-ba4-rank0.pt is corrupt or truncated; skipped" in caplog.text
    assert not (tmp_path / "new" / "summary.json").exists()  # of step 4
    uploads.restore(tmp_path / "none", store, 4, lambda stored: None)
    assert not [*(tmp_path / "none").iterdir()]


@pytest.mark.parametrize("older", [False, True])
def test_a_download_killed_at_any_moment_is_repeated_to_the_same_folder(folder, tmp_path, monkeypatch, older):
    class Killed(BaseException):
        pass

    (folder / "best-rank0.pt").symlink_to("ep0-ba2-rank0.pt")
    store = remote.Store(str(tmp_path / "remote"), "save_remote")
    assert uploads.Uploads(folder, store).finish() is None
    left = [10**9]

    def counted(function):
        def call(*given, **named):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*given, **named)

        return call

    for name in ("link", "write_atomically", "is_valid_checkpoint"):
        monkeypatch.setattr(uploads, name, counted(getattr(uploads, name)))
    monkeypatch.setattr(remote.Store, "download", counted(remote.Store.download))
    monkeypatch.setattr(Path, "replace", counted(Path.replace))

    def restore(new: Path) -> None:
        own = latest_valid_checkpoint(new)
        uploads.restore(new, store, -1 if own is None else remote.checkpoint_step(own.name), lambda stored: None)

    for calls in itertools.count():
        new = tmp_path / f"killed-{calls}"
        new.mkdir()
        if older:  # the run is here up to an earlier step
            (new / "config.yaml").write_text("seed: 1\n")
            torch.save({"step": 1}, new / "ep0-ba1-rank0.pt")
            (new / "metrics.jsonl").write_text('{"step": 1}\n')
        left[0] = calls
        with suppress(Killed):
            restore(new)
        was_killed, left[0] = left[0] < 0, 10**9
        found = {path.name for path in new.iterdir()}
        assert "config.yaml" in found or not [name for name in found if remote.checkpoint_step(name)]
        restore(new)
        restored = {path.name: path.read_bytes() for path in new.iterdir() if "unfinished" not in path.name}
        restored.pop("ep0-ba1-rank0.pt", None)
        expected = {path.name for path in folder.iterdir() if path.is_file() and "unfinished" not in path.name}
        if "summary.json" not in restored:  # killed just before it: the run evaluates again
            expected.remove("summary.json")
        assert restored == {name: (folder / name).read_bytes() for name in expected}
        if not was_killed:
            break
    assert calls > 10 and "summary.json" in restored


@pytest.mark.slow
def test_another_runs_address_is_refused_also_by_a_run_that_is_further(store, tmp_path, write_config):
    config = write_config(tmp_path, **SHORT)
    main.main([str(config), f"save_remote={store.address}", "max_duration=2ba"])
    other = [str(config), "seed=5", f"save_folder={tmp_path / 'other'}"]
    main.main(other)
    with pytest.raises(UserError, match=rf"^save_remote: {store.address} holds a run that differs in seed; "):
        main.main([*other, f"save_remote={store.address}"])
    client, names = store.client, store.names()
    if client is None:
        Path(store.address, "config.yaml").unlink()
        with pytest.raises(UserError, match=r"^save_remote: .* has checkpoints but no config.yaml; restore it or"):
            main.main([*other, f"save_remote={store.address}"])
        names.remove("config.yaml")
    assert store.names() == names


@pytest.mark.slow
def test_a_run_whose_files_could_not_be_uploaded_is_kept_and_says_so(s3, tmp_path, write_config, monkeypatch):
    def fail(self, path, name):
        raise ConnectionError("the network is down")

    config, options = write_config(tmp_path, **SHORT), [f"save_remote={s3.address}"]
    upload = remote.Store.upload
    monkeypatch.setattr(remote.Store, "upload", fail)
    with pytest.raises(RunFailed, match=r"the run is finished and saved in .*; repeat the command to retry"):
        main.main([str(config), *options])
    monkeypatch.setattr(remote.Store, "upload", upload)
    main.main([str(config), *options])
    assert "summary.json" in s3.names()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://no-such-bucket/x", "cannot be read"),
        ("ftp://host/x", "cannot be opened"),
    ],
)
def test_an_address_that_cannot_be_used_is_named(s3, tmp_path, write_config, address, message):
    with pytest.raises(UserError, match=rf"^save_remote: {address} {message}"):
        main.main([str(write_config(tmp_path, **SHORT)), f"save_remote={address}"])
    with pytest.raises(UserError, match=rf"^KEY: {address}"):
        remote.fetch(f"{address}/ep0-ba2-rank0.pt", "KEY")
    with pytest.raises(UserError, match=r"^KEY: s3:/bucket lacks a slash; write s3://bucket$"):
        remote.Store("s3:/bucket", "KEY")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^KEY: .*file is a file; give a folder$"):
        remote.Store(str(tmp_path / "file"), "KEY")
