"""What is measured on a machine: once, in the user's cache, and kept with a run."""

import fcntl
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import warm

from src.errors import UserError
from src.lion import cpu_crossover, cpu_kernel, cpu_linear, machine
from src.lion.two_sided_attention import resolve_form
from src.machine import described
from src.training import choices
from tests.conftest import ROOT, environment


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing known in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine._choice.cache_clear()
    yield tmp_path / "lion-bert"
    machine._choice.cache_clear()


def test_a_choice_is_measured_once_and_read_by_later_processes(cache):
    calls = []

    def measure() -> list[bool]:
        calls.append(1)
        return [True, False]

    assert machine.choice("example", measure) == [True, False]
    assert machine.choice("example", measure) == [True, False] and len(calls) == 1
    machine._choice.cache_clear()  # as in another process
    assert machine.choice("example", measure) == [True, False] and len(calls) == 1
    (path,) = machine.kept()
    stored = json.loads(path.read_text())
    assert stored["threads"] == torch.get_num_threads() and stored["torch"] == torch.__version__
    path.write_text("{")  # truncated
    machine._choice.cache_clear()
    assert machine.choice("example", measure) == [True, False] and len(calls) == 2


def test_of_threads_that_measure_at_once_all_take_the_first_result(cache):
    calls = []

    def measure() -> int:
        calls.append(1)
        time.sleep(0.05)
        return len(calls)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: machine.choice("example", measure), range(4))) == [1] * 4


def test_it_is_measured_with_the_memory_settings_of_training(cache, monkeypatch):
    order = []
    monkeypatch.setattr(machine, "_keeps_freed_memory", False)
    monkeypatch.setattr(machine, "_set_malloc", lambda **settings: order.append(settings["mmap_max"]) or True)
    machine.choice("example", lambda: order.append("measured"))
    assert order == [0, "measured", 2**16]  # a process that only infers takes no more memory from then on
    machine.keep_freed_memory()  # as training does
    machine.choice("other", lambda: order.append("measured"))
    assert order[3:] == [0, 0, "measured"]


def test_of_two_processes_that_measure_at_once_both_take_the_first_result(cache):
    def measure_slowly() -> str:
        machine._choice.__wrapped__("example", lambda: "first", torch.get_num_threads(), "")
        return "second"

    assert machine.choice("example", measure_slowly) == "first"


def test_another_processor_and_other_threads_are_measured_by_themselves(cache, monkeypatch):
    names = iter("abc")
    assert machine.choice("example", lambda: next(names)) == "a"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert machine.choice("example", lambda: next(names)) == "b"
    monkeypatch.setattr(machine, "digest", lambda: "other")
    machine._choice.cache_clear()
    assert machine.choice("example", lambda: next(names)) == "c"


def test_without_a_writable_home_it_is_measured_in_each_process(cache):
    cache.touch()  # a file in place of the folder
    assert machine.choice("example", lambda: 1) == 1
    assert machine.kept() == []


def test_the_measurement_names_every_shape_and_product(monkeypatch):
    monkeypatch.setattr(cpu_linear, "SHAPES", {"square": (64, 64), "wider": (96, 64), "narrower": (64, 96)})
    found = cpu_linear.measure()
    assert set(found) == {"square", "wider", "narrower"}
    assert all(len(x) == 3 for x in found.values())
    assert all(changes == sorted({*changes} & {*cpu_linear.TOKENS}) for x in found.values() for changes in x)


def test_onednn_is_chosen_for_the_numbers_of_tokens_with_which_it_is_faster(monkeypatch):
    now = 0.0

    def product(x, weight, grad, way: bool = False) -> None:
        nonlocal now
        now += {8: 0.97, 128: 0.97, 256: 1.01, 512: 0.8}.get(len(x), 0.5) if way else 1  # of MKL's time

    def of_weight(grad, x, way: bool) -> None:
        nonlocal now
        now += 1

    monkeypatch.setattr(cpu_linear.time, "perf_counter", lambda: now)
    monkeypatch.setattr(cpu_linear, "_output", product)
    monkeypatch.setattr(cpu_linear, "_of_input", lambda grad, weight, way: product(grad, weight, grad, way))
    monkeypatch.setattr(cpu_linear, "_of_weight", of_weight)
    assert cpu_linear.measure() == {shape: [[32, 256, 512]] * 2 + [[]] for shape in cpu_linear.SHAPES}


@pytest.mark.parametrize(
    ("changes", "within", "words"),
    [
        ([], [], "MKL"),
        ([32], [32, 300, 1024], "oneDNN: from 32 tokens"),
        ([8, 256], [8, 32], "oneDNN: 8 to 255 tokens"),
        ([8, 256, 1024], [8, 32, 1024], "oneDNN: 8 to 255, from 1,024 tokens"),
    ],
)
def test_onednn_computes_the_numbers_of_tokens_between_changes(changes, within, words):
    assert [tokens for tokens in (8, 32, 300, 1024) if cpu_linear._is_within(changes, tokens)] == within
    assert described(changes) == words


@pytest.mark.parametrize(
    ("ratios", "length"),
    [
        ([2, 1.5, 1.25, 0.75, 0.5, 0.4, 0.3, 0.2], 288),
        ([0.9] * 8, 128),
        ([2] * 7 + [1.1], 1024),
        ([2, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], 192),
        ([2] * 6 + [1.2, 0.8], 896),
    ],
)
def test_the_full_form_is_taken_up_to_where_both_take_the_same_time(ratios, length, monkeypatch):
    at = dict(zip(cpu_crossover.LENGTHS, ratios, strict=True))
    monkeypatch.setattr(cpu_crossover, "_ratio", lambda full, chunkwise: at[full])
    assert cpu_crossover._crossover(lambda length: (length, None)) == length


@pytest.mark.skipif(not cpu_kernel.is_available(), reason="needs a C compiler")
def test_the_form_is_chosen_by_what_was_measured(monkeypatch):
    measured = [cpu_crossover.measure(kind) for kind in cpu_crossover.KINDS]
    assert all(128 <= found[mode] <= 1024 for found in measured for mode in ("training", "inference"))
    lengths = zip(cpu_crossover.KINDS, (300, 400, 500))
    adopted = {f"full_up_to{kind}": {"training": length, "inference": length - 100} for kind, length in lengths}
    monkeypatch.setattr(machine, "_adopted", adopted)

    def longest_full(**how) -> int:
        lengths = range(1, 1100)
        full = [resolve_form("auto", torch.empty(1, 1, length, 4), True, **how) == "full" for length in lengths]
        assert full == sorted(full, reverse=True)
        return sum(full)

    assert (longest_full(), longest_full(one_sided=True), longest_full(both_in_kernel=False)) == (300, 150, 64)
    assert [longest_full(kind=kind) for kind in cpu_crossover.KINDS] == [300, 400, 500]
    with torch.inference_mode():
        assert longest_full() == 200
    assert torch.func.vmap(lambda x: x * longest_full())(torch.ones(1)) == 128
    monkeypatch.setattr(machine, "_adopted", {"full_up_to": {"training": 1024, "inference": 128}})
    assert longest_full() == 1024  # and longer texts never


def test_a_run_keeps_its_choices_on_another_machine(cache, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    there = {"square": [[128], [256, 512], []], "wider": [[1024]] * 3, "narrower": [[]] * 3}
    monkeypatch.setattr(cpu_linear, "can_choose", lambda: True)
    monkeypatch.setattr(cpu_linear, "measure", lambda: there)
    up_to = {f"full_up_to{kind}": {"training": 300, "inference": 200} for kind in cpu_crossover.KINDS}
    monkeypatch.setattr(cpu_crossover, "measure", lambda kind: up_to[f"full_up_to{kind}"])
    choices.keep(choices.recall(run, "*.pt"), run)
    stored = json.loads((run / choices.MACHINE).read_text())
    native = {"native": True, **up_to} if cpu_kernel.is_available() else {"native": False}
    assert stored == {**native, "onednn_from": there}
    monkeypatch.setattr(machine, "_adopted", {})
    machine._choice.cache_clear()
    machine.kept()[0].unlink()
    choices.recall(run, "*.pt")
    assert machine.choice("onednn_from", lambda: "measured here") == there
    numbers = {"square": [128, 256, None], "wider": [1024] * 3, "narrower": [None] * 3}  # as earlier versions wrote
    for name in ("convolved_from", "onednn_from"):
        (run / choices.MACHINE).write_text(json.dumps({"native": True, name: numbers}))
        converted = {"square": [[128], [256], []], "wider": [[1024]] * 3, "narrower": [[]] * 3}
        assert choices.recall(run, "*.pt")["onednn_from"] == converted
    (run / choices.MACHINE).write_text(json.dumps({"native": True}))  # as with one thread, then
    assert choices.recall(run, "*.pt")["onednn_from"] == dict.fromkeys(there, [[]] * 3)
    earlier = {"square": [True, False, True], "wider": [False] * 3, "narrower": [True] * 3}
    (run / choices.MACHINE).write_text(json.dumps({"native": True, "convolutions": earlier}))
    recalled = choices.recall(run, "*.pt")
    assert recalled["onednn_from"]["square"] == [[1024], [], [1024]]
    assert all(recalled[name] == {"training": 192, "inference": 192} for name in up_to)
    for damaged in (
        "{",
        '{"native": true, "onednn_from": {"square": ["x"]}}',
        '{"native": true, "full_up_to": null}',
        '{"native": true, "full_up_to": {"training": 300}}',
    ):
        (run / choices.MACHINE).write_text(damaged)
        with pytest.raises(UserError, match=r"machine\.json is corrupt; delete it"):
            choices.recall(run, "*.pt")


def test_a_run_of_before_there_were_choices_continues_as_it_began(tmp_path):
    (tmp_path / "ep0-ba1-rank0.pt").touch()
    assert choices.recall(tmp_path, "ep*-rank0.pt")["native"] is False
    assert not cpu_kernel.is_available()
    (tmp_path / "ep0-ba1-rank0.pt").unlink()
    assert choices.recall(tmp_path, "ep*-rank0.pt")["native"] is cpu_kernel.is_available()


def test_a_run_says_that_its_kernel_is_missing(tmp_path, monkeypatch, caplog):
    (tmp_path / choices.MACHINE).write_text('{"native": true}')
    monkeypatch.setattr(cpu_kernel, "USE_NATIVE", False)
    caplog.set_level("INFO")
    choices.recall(tmp_path, "*.pt")
    assert "not available here (LION_NATIVE=0)" in caplog.text


def test_a_process_waits_for_another_that_measures_and_takes_what_it_found(cache):
    path = machine.private_folder() / ".lock"
    with path.open("w") as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)  # another open file excludes as another process does
        waiting = pool.submit(machine.choice, "height", lambda: pytest.fail("measured"))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        name = f"height-{torch.get_num_threads()}-threads-{machine.digest()}-{machine.METHOD}.json"
        path.with_name(name).write_text(json.dumps({"height": 7}))
        fcntl.flock(file, fcntl.LOCK_UN)
        assert waiting.result(timeout=60) == 7
    assert machine.choice("width", lambda: machine.choice("depth", lambda: 2) + 1) == 3  # one may need another


def test_without_a_home_nothing_is_kept_and_the_way_out_is_named(monkeypatch):
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert machine.kept() == []
    with pytest.raises(RuntimeError, match="this user has no home; set XDG_CACHE_HOME to a folder of your own"):
        machine.private_folder()
    assert machine.choice("of no home", lambda: 3) == 3


def test_the_command_prints_what_was_found_and_forgets_it(tmp_path):
    def run(*options: str) -> str:
        variables = {"XDG_CACHE_HOME": str(tmp_path)}
        status, output = warm.run("src/machine.py", *options, output=tmp_path / "output", **variables)
        assert status == 0, output
        return output

    printed = run()
    assert "1 threads" in printed and "linear attention" in printed
    how = "in float32, by MKL or oneDNN" if cpu_linear.can_choose() else "by torch, which lacks"
    assert f"linear layers       {how}" in printed
    kept = [path.name for path in (tmp_path / "lion-bert").glob("[!.]*")]  # without .lock
    assert all(name in printed for name in kept)
    assert run("--forget").count("deleted") == len(kept)
    assert {path.name for path in (tmp_path / "lion-bert").glob("*")} <= {".lock"}


def test_idle_threads_of_openmp_do_not_spin_for_long():
    program = "import os; from src import cli; print(os.environ.get('GOMP_SPINCOUNT'))"
    for given, expected in (({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")):
        variables = {k: v for k, v in environment().items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | given
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.stdout.strip() == expected


def test_commands_say_so_before_torch_is_imported():
    for script in ("main.py", "glue.py", "vision.py", "embed.py", "src/hub.py", "src/convert_dataset.py"):
        lines = (ROOT / script).read_text().splitlines()
        ours = [line for line in lines if line.startswith(("from ", "import ")) and "src" in line]
        assert ours[0].startswith(("from src import cli", "from src.cli import")), script
        assert not any(line.startswith(("import torch", "from torch")) for line in lines), script


@pytest.mark.skipif(not cpu_kernel.is_available(), reason="needs a C compiler")
def test_what_was_measured_is_read_once(cache, monkeypatch):
    found, read = {"training": 300, "inference": 200}, []
    monkeypatch.setattr(cpu_crossover, "measure", lambda kind: found)
    monkeypatch.setattr(machine, "_read", lambda path, name: read.append(name) or found)
    for kind in cpu_crossover.KINDS * 2:
        assert cpu_crossover.full_up_to(kind) == found
    assert read == [f"full_up_to{kind}" for kind in cpu_crossover.KINDS]
