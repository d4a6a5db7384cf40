"""The benchmarks run, and write what they say, at sizes where their numbers mean nothing."""

import contextlib
import importlib
import json
import os
import pickle
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import plain
import pytest
import torch
import warm
from conftest import ROOT, environment
from glue_files import write_glue
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from benchmarks import measure, models
from src.errors import UserError
from src.lion.losses import labelled_positions
from src.lra.tasks import LRA
from src.lra.training import build_model, build_settings

STEP = "--layers 1 --hidden 64 --batch 2"
TINY = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
# What is given to a command, and the name of what it writes.
SMALL = {
    "operator": (
        "--lengths 16 40 --tokens 64 --forms chunkwise --heads 2 --head_dim 8 --rounds 1", "operator-cpu-2-heads-of-8",
    ),
    "inference": (
        "--models 'Hugging Face BERT' softmax lion-s-plus hydra --lengths 16 40 --batch 1 2 --layers 1 --hidden 64 "
        "--rounds 1 --dtype bfloat16", "inference-cpu-1-layers-of-64-bfloat16",
    ),
    "embed": (
        "--models lion-s --lengths 24 40 80 --once_above 40 --layers 1 --hidden 64 --rounds 1 --dtype bfloat16",
        "embed-cpu-1-layers-of-64",
    ),
    "train_step": (
        "--models 'Hugging Face BERT, sparse' 'Hugging Face ModernBERT' softmax hydra yamls/ablation/lion-d-rope.yaml "
        f"{STEP} --length 32 24 --rounds 1 --precision amp_bf16",
        "train-step-cpu-1-layers-of-64-batch-2-32-24-amp_bf16",
    ),
    "vision": (
        "--models 'Hugging Face ViT' 'timm DeiT' lion-s-natural --train_size tiny --train_pixels 32 --batch 2 "
        "--pixels 32 48 --rounds 1",
        "vision-cpu-tiny-and-tiny",
    ),
}  # fmt: skip


def benchmark(name: str, out: Path, *arguments: object) -> str:
    """Run a benchmark that writes to a folder, and return its output."""
    status, output = warm.run(f"benchmarks/{name}.py", *arguments, "--out", out, output=out / "output")
    assert status == 0, output
    return output


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_writes_a_table_and_its_numbers(name, tmp_path):
    arguments, stem = SMALL[name]
    output = benchmark(name, tmp_path, *shlex.split(arguments), "--device", "cpu")
    written = json.loads((tmp_path / f"{stem}.json").read_text())
    assert {"device", "threads", "torch", "date"} <= written["machine"].keys()
    assert (tmp_path / f"{stem}.md").read_text().strip() in output
    if name == "operator":
        cases = {(row["length"], row["form"], row["variant"]) for row in written["rows"]}
        assert {(row["length"], row["batch"]) for row in written["rows"]} == {(16, 4), (40, 1)}
        assert len(cases) == len(written["rows"]) == 10
        assert all(row["forward_ms"] > 0 and row["both_ms"] > 0 and row["peak_mib"] >= 0 for row in written["rows"])
        assert all(0 < row["forward_floor_ms"] < row["both_floor_ms"] for row in written["rows"])
        assert (40, "chunkwise", "hydra") in cases and "| hydra / S |" in output
        assert (tmp_path / f"{stem}.png").stat().st_size > 1000
    elif name == "inference":
        cases = {(row["batch"], row["length"], row["model"], row["form"]) for row in written["rows"]}
        assert len(cases) == len(written["rows"]) == 16
        assert all(row["ms"] > 0 and row["peak_mib"] >= 0 for row in written["rows"])
        assert any(row["peak_mib"] > 0 for row in written["rows"])
        assert (tmp_path / f"{stem}.png").stat().st_size > 1000
    elif name == "embed":
        cases = [(row["dtype"], row["length"], row["model"], row["reading"]) for row in written["rows"]]
        assert cases == [("bfloat16", length, "lion-s", "whole") for length in (24, 40, 80)]
        assert all(row["ms"] > 0 and row["peak_mib"] >= 0 and not row["error"] for row in written["rows"])
        assert "time per token at 80, relative to 24" in output
        assert (tmp_path / f"{stem}.png").stat().st_size > 1000
    elif name == "vision":
        cases = {(row["what"], row["model"], row["pixels"]) for row in written["rows"]}
        assert len(cases) == len(written["rows"]) == 9
        assert all(row["ms"] > 0 and "error" not in row for row in written["rows"])
        assert (tmp_path / f"{stem}.png").stat().st_size > 1000
    else:
        names = ["Hugging Face BERT, sparse", "Hugging Face ModernBERT", "softmax", "hydra", "lion-d-rope"]
        assert [row["model"] for row in written["rows"]] == names
        assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in written["rows"])
        assert (tmp_path / f"{stem}.png").stat().st_size > 1000


def test_a_training_step_on_packed_rows_leaves_out_models_without_packing(tmp_path):
    train_step = importlib.import_module("benchmarks.train_step")
    texts = train_step.random_texts(5, 20, 4, "cpu")
    assert [row.unique_consecutive().tolist() for row in texts] == [[0, 1, 2, 3]] * 5
    models = "'Hugging Face BERT' softmax lion-s"
    output = benchmark("train_step", tmp_path, *shlex.split(f"--models {models} {STEP} --length 32 --packed 3"))
    assert "2 rows of 32 tokens in 3 texts" in output and "failed: Hugging Face BERT: bert has no packed rows" in output
    written = json.loads((tmp_path / "train-step-cpu-1-layers-of-64-packed-3-batch-2-32.json").read_text())
    assert [row["model"] for row in written["rows"] if row.get("ms")] == ["softmax", "lion-s"]


@pytest.mark.parametrize("given", ["a", "=x", "a/b={mixer}{seed}", "a={mixer}", "a={mixer}-{seed}-{other}"])
def test_checkpoints_to_start_from_have_a_name_and_a_pattern(given, tmp_path):
    reach = importlib.import_module("benchmarks.reach")
    with pytest.raises(UserError, match=r"--start_from .*give NAME=PATH"):
        reach.main(["header", "--out", str(tmp_path), "--tokenizer", "none", "--start_from", given])
    options = SimpleNamespace(task="passkey", mixers=["lion-d"], start_from=["a={mixer}/{seed}.pt"])
    starts, cases = reach.from_checkpoints(options)
    assert starts == {"a": ["starting_checkpoint_load_path={mixer}/{seed}.pt"]}
    assert cases == [reach.Case("lion-d", "a", "attention")]


def test_a_failing_case_affects_only_its_own_row(tmp_path, capsys):
    runs = {"good": lambda: None, "bad": lambda: 1 / 0}
    failed = {}
    assert set(measure.interleaved(runs, "cpu", 2, 1, failed)) == {"good"}
    assert failed == {"bad": "division by zero"}
    with pytest.raises(ZeroDivisionError):
        measure.interleaved(runs, "cpu", 2, 1)
    rows = [{"case": name, "ms": None, "error": failed.get(name)} for name in runs]
    measure.write(tmp_path, "some", "Title:", {}, [[["case"], ["good"]]], rows, show=False)
    assert (tmp_path / "some.md").read_text().endswith("\n\nfailed: bad: division by zero\n")
    assert capsys.readouterr().out == ""


def test_a_slow_case_runs_once_if_asked_to():
    runs, ends = [], []
    cases = {"a": lambda: runs.append("a"), "b": lambda: runs.append("b")}
    measure.interleaved(cases, "cpu", 9, 0, least=1, warm_ups=0, after=lambda: ends.append(len(runs)))
    assert (runs, ends) == (["a", "b"], [1, 2])
    runs.clear()
    measure.interleaved(cases, "cpu", 9, 0)
    assert runs == ["a", "b"] * 4


def test_a_process_of_its_own_returns_what_a_function_returns_or_its_failure():
    assert measure.apart(divmod, 7, 2) == (3, 1)
    failed = {}
    assert measure.attempt(failed, "raises", measure.apart, divmod, 1, 0) is None
    assert measure.attempt(failed, "dies", measure.apart, os._exit, 1) is None
    assert failed["raises"].startswith("integer division") and "terminated" in failed["dies"]


def test_a_capture_that_fails_says_why(monkeypatch):
    @contextlib.contextmanager
    def graph(*given, **options):
        try:
            yield
        finally:
            raise RuntimeError("the capture is invalid")

    runs = iter([1, 1, 1])  # three to warm up
    monkeypatch.setattr(torch, "cuda", MagicMock(graph=graph))
    with pytest.raises(ZeroDivisionError):
        measure._replay_seconds(lambda: 1 / next(runs, 0), 1, 1)


@pytest.mark.parametrize("name", ["train_step", "inference"])
def test_a_cuda_graph_needs_a_gpu(name):
    with pytest.raises(UserError, match="--graph needs a GPU"):
        importlib.import_module(f"benchmarks.{name}").main(["--device", "cpu", "--graph"])


def test_the_table_of_steps_has_the_time_or_the_failure_of_a_graph_and_the_setting_of_a_peer():
    train_step = importlib.import_module("benchmarks.train_step")
    rows = [
        {"model": models.BERT, "attention": "sdpa, no mask", "ms": 20, "graph_ms": 16, "graph_error": None},
        {"model": "softmax", "ms": 10, "graph_ms": None, "graph_error": "not permitted"},
    ]
    header, bert, softmax = train_step.table([{**row, "floor_ms": 5} for row in rows], 1000)
    assert header[:3] == ["model", "step, ms", "as a CUDA graph, ms"]
    assert bert == ["Hugging Face BERT (sdpa, no mask)", "20.0", "16.0", "50,000", "25%", "×1.00", "×2.00"]
    assert softmax == ["softmax", "10.0", "not permitted", "100,000", "50%", "×0.50", "×1.00"]


def test_peers_are_named_by_their_setting_on_a_gpu_only(monkeypatch):
    def titles(device: str, half: bool) -> list[str]:
        names = (models.BERT, models.MODERN_BERT, "softmax", "lion-s")
        return [models.titled({"model": name, **models.setting(name, device, half)}) for name in names]

    monkeypatch.setattr(models, "sdpa_backend", lambda half: "cudnn_attention" if half else "efficient_attention")
    assert titles("cpu", True) == [models.BERT, models.MODERN_BERT, "softmax", "lion-s"]
    for available, kind in ((False, "sdpa, masks in local layers only"), (True, "flash_attention_2, unpadded")):
        monkeypatch.setattr(models, "is_flash_attn_2_available", lambda available=available: available)
        sdpa = "(sdpa, no mask, cudnn_attention)"
        expected = [f"{models.BERT} {sdpa}", f"{models.MODERN_BERT} ({kind})", f"softmax {sdpa}", "lion-s"]
        assert titles("cuda", True) == expected
    assert "sdpa" in titles("cuda", False)[1]


@pytest.mark.parametrize("name", [models.BERT, models.MODERN_BERT])
def test_a_peer_without_masks_computes_the_same_and_does_not_look_for_padding(name, monkeypatch):
    torch.manual_seed(0)
    model, ids = models.build(name, 4, 64, 300).eval(), torch.randint(5, 1000, (2, 300))
    given, attend = [], F.scaled_dot_product_attention

    def record(*heads, attn_mask, **options):
        given.append(attn_mask)
        return attend(*heads, attn_mask=attn_mask, **options)

    with torch.no_grad():
        expected = model(ids).last_hidden_state
        models.drop_masks(model)
        monkeypatch.setattr(F, "scaled_dot_product_attention", record)
        torch.testing.assert_close(model(ids).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
    local = {1, 2} if name == models.MODERN_BERT else set()
    assert {layer for layer, mask in enumerate(given) if mask is not None} == local


@pytest.mark.parametrize("name", [models.BERT, models.MODERN_BERT, "softmax"])
def test_the_loss_of_masked_language_modelling_is_the_models_own(name):
    model, ids = models.build(name, 1, 64, 16, masked_lm=True).train(), torch.randint(5, 1000, (2, 16))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.7, -100)
    loss = models.masked_lm_loss(model, ids, labels, labelled_positions(labels))
    torch.testing.assert_close(loss, model(input_ids=ids, labels=labels).loss)


@pytest.mark.parametrize("name", models.TRAINED)
def test_a_step_of_each_model_reads_no_value_so_that_a_cuda_graph_can_contain_it(name):
    with FakeTensorMode():  # whose tensors have none
        model = models.build(name, 2, 64, 16, dropout=0.1, masked_lm=True).train()
        if name in (models.BERT, models.SPARSE_BERT, models.MODERN_BERT):
            models.drop_masks(model)
        ids = torch.randint(5, 1000, (2, 16))
        models.masked_lm_loss(model, ids, ids, torch.arange(7)).backward()


@pytest.mark.parametrize("name", [models.BERT, models.MODERN_BERT])
def test_the_vector_of_a_document_in_windows_is_the_mean_of_theirs(name):
    embed = importlib.import_module("benchmarks.embed")
    model = embed.load(name, 1, 64, 512, "float32", "cpu")
    ids = torch.randint(5, 1000, (1, 5 * embed.WINDOW + 70))
    batches = embed.windows(ids, 2)
    assert [tuple(part.shape) for part in batches] == [(2, 512), (2, 512), (1, 512), (1, 70)]
    with torch.no_grad():
        each = [model(part).last_hidden_state[0].mean(0) for part in ids.split(embed.WINDOW, 1)]
    assert torch.allclose(embed.encode(model, batches), torch.stack(each).mean(0), atol=1e-5)


def test_the_vector_of_a_document_by_lion_is_the_mean_of_its_tokens():
    embed = importlib.import_module("benchmarks.embed")
    model = embed.load("lion-lit", 1, 64, 600, "float32", "cpu")
    ids = torch.randint(5, 1000, (1, 600))
    with torch.no_grad():
        expected = model.lion(ids).last_hidden_state[0].mean(0)
    assert torch.allclose(embed.encode(model, [ids]), expected, atol=1e-5)


def test_the_ratios_of_documents_compare_lengths_and_ways_to_read():
    embed = importlib.import_module("benchmarks.embed")
    times = {  # ms at 512, 2,048 and 8,192 tokens
        ("lion-d", "whole"): (10, 40, 180),
        (models.BERT, "whole"): (9, 60, 540),
        (models.BERT, "windows of 512"): (10, 50, 200),
    }
    rows = [
        {"dtype": "float32", "length": length, "model": model, "reading": reading, "ms": ms}
        for (model, reading), each in times.items()
        for length, ms in zip((512, 2048, 8192), each)
    ]
    header, cells = embed.ratios(rows, [512, 2048, 8192], 8192)
    assert len(header) == len(cells)
    assert cells == ["float32", "lion-d", "×1.12", "×3.00", "×1.00", "×0.80", "×0.90"]
    unfinished = [row for row in rows if row["length"] < 8192]
    assert embed.ratios(unfinished, [512, 2048, 8192], 8192)[1][2:] == ["-", "-", "×1.00", "×0.80", "-"]


@pytest.mark.parametrize("form", ["softmax", "softmax-cudnn", "full", "pytorch-chunkwise"])
def test_operator_cases_have_the_models_memory_layout(form, monkeypatch):
    operator = importlib.import_module("benchmarks.operator")
    variant = "softmax" if form.startswith("softmax") else "lion-s"
    seen = {}
    monkeypatch.setattr(torch.autograd, "grad", lambda y, leaves, grad: seen.update(y=y, leaves=leaves, grad=grad))
    operator.prepare(form, variant, 24, True, 2, 3, 8, "float32", 16, "cpu")()
    assert [tuple(x.shape) for x in seen["leaves"]] == [(2, 3, 24, 8)] * 3 + [(2, 3, 24)] * (variant == "lion-s")
    assert all(x.transpose(1, 2).is_contiguous() and x.is_leaf for x in seen["leaves"])
    assert seen["y"].shape == seen["grad"].shape


@pytest.mark.parametrize("form", ["softmax", "full", "chunkwise", "pytorch-chunkwise", "fla"])
def test_padding_is_masked_in_every_form_of_the_operator(form, monkeypatch):
    operator, grad = importlib.import_module("benchmarks.operator"), torch.autograd.grad
    seen = []
    monkeypatch.setattr(operator, "both_directions", lambda q, k, v, _: F.scaled_dot_product_attention(q, k, k * v))
    case = "softmax" if form == "softmax" else "lion-lit" if form != "fla" else "lion-s"
    monkeypatch.setattr(torch.autograd, "grad", lambda y, leaves, dy: seen.extend(grad(y, leaves[2], dy)))
    operator.prepare(form, case, 40, True, 2, 3, 8, "float32", 16, "cpu", True)()
    (grad_v,) = seen
    assert grad_v[:, :, :36].any(-1).all() and not grad_v[:, :, 36:].any()


@pytest.mark.parametrize(
    "form, dtype, masked, expected",
    [
        ("softmax", torch.bfloat16, False, "FLASH_ATTENTION"),
        ("softmax", torch.bfloat16, True, "EFFICIENT_ATTENTION"),
        ("softmax", torch.float32, False, "EFFICIENT_ATTENTION"),
        ("softmax-cudnn", torch.bfloat16, True, "CUDNN_ATTENTION"),
    ],
)
def test_softmax_is_computed_by_an_implementation_that_takes_its_arguments(form, dtype, masked, expected):
    assert importlib.import_module("benchmarks.operator").backend(form, dtype, masked).name == expected


def test_a_form_whose_backward_pass_fails_still_has_a_forward_time(monkeypatch):
    operator = importlib.import_module("benchmarks.operator")
    monkeypatch.setattr(operator, "prepare", lambda form, *given: lambda: given[2] and form == "fla" and 1 / 0)
    a = SimpleNamespace(device="cpu", rounds=1, seconds=1, mask=False, dtype="float32")
    cases = [operator.SOFTMAX, ("fla", "lion-s")]
    softmax, fla = operator.timed(cases, 16, (1, 2, 8, "float32", 16, "cpu"), measure.Rates(1e9, 1e9), a)
    assert fla["forward_ms"] > 0 and fla["both_ms"] is None and fla["error"] == "division by zero"
    assert softmax["both_ms"] > 0 and softmax["error"] is None
    softmax["backend"] = "FLASH_ATTENTION"
    header, first, second = operator.table([softmax, fla])
    assert first[2] == "softmax (FLASH_ATTENTION)"
    assert [x == "failed" for x in second] == [title == "with backward, ms" for title in header]


@pytest.mark.parametrize("form", ["full", "recurrent", "chunkwise", "pytorch-full", "pytorch-chunkwise"])
def test_the_operator_of_hydra_has_gradients_of_all_its_operands(form, monkeypatch):
    operator, seen = importlib.import_module("benchmarks.operator"), {}
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *given: seen.update(leaves=given[1], grads=grad(*given)))
    operator.prepare(form, "hydra", 24, True, 2, 3, 8, "float32", 16, "cpu")()
    q, v, numbers = (2, 1, 24, 8), (2, 3, 24, 8), (2, 3, 24)
    shapes = [q, q, v, q, q, (2, *numbers), (2, *numbers), numbers]  # of both directions: decays and weights
    assert [tuple(x.shape) for x in seen["leaves"]] == shapes
    assert all(x.isfinite().all() and x.any() for x in seen["grads"])


def test_the_operator_of_hydra_shares_queries_and_keys_in_its_floor():
    operator = importlib.import_module("benchmarks.operator")
    B, H, L, N, C = 2, 3, 64, 8, 16
    for backward, (values, scores, states), (wide, shared, numbers) in (
        (False, (1, 2, 4), (2, 4, 5)),  # v, y; q and k of two directions; their log decays and weights, the diagonal
        (True, (3, 8, 14), (5, 12, 15)),
    ):
        moved, operations = operator.least("chunkwise", "hydra", L, backward, B, H, N, "bfloat16", C, "cpu")
        assert moved == pytest.approx(B * L * (2 * N * (H * wide + shared) + 4 * H * numbers))
        assert operations == pytest.approx(2 * B * L * (C * N * (H * values + scores) + H * states * N * N))


def test_peers_are_compared_with_what_they_compute():
    operator = importlib.import_module("benchmarks.operator")
    assert operator.variants("softmax-cudnn") == ("softmax",)
    assert set(operator.variants("fla")) == {"lion-d", "lion-s"}
    assert all("hydra" in operator.variants(form) for form in ("full", "chunkwise", "pytorch-full"))


def test_the_models_and_the_configs_of_the_ablation_are_about_as_large_as_each_other():
    configs = [str(path) for path in Path(__file__).parents[1].glob("yamls/ablation/*.yaml")]
    with torch.device("meta"):
        sizes = {
            name: sum(x.numel() for x in models.build(name, 12, 768, 128, dropout=0.1).parameters())
            for name in (*models.MODELS, *configs)
        }
        hydra = models.build("hydra", 24, 1024, 128).config
        gate = models.build(next(name for name in configs if name.endswith("-gate.yaml")), 12, 768, 128).config
    assert configs and all(sizes[name] == pytest.approx(sizes["lion-s"], rel=0.02) for name in configs)
    assert gate.value_gate and (gate.hidden_size, gate.intermediate_size) == (768, 2688)
    assert hydra.num_hidden_layers == 45 and hydra.num_attention_heads == 32
    assert all(size == pytest.approx(sizes["softmax"], rel=0.05) for size in sizes.values())
    assert models.describe(["lion-s", "hydra"], 12, 768) == "12 layers (23 in hydra) of 768"
    assert models.describe(["hydra"], 4, 256) == "7 layers of 256"


def test_the_recipes_of_long_range_arena_are_timed_and_one_that_fails_has_a_row(tmp_path, monkeypatch, capsys):
    lra = importlib.import_module("benchmarks.lra")
    seen = []

    def here(function: Callable, case: Any, *how: Any) -> dict:  # a process would import everything again
        seen.append(pickle.loads(pickle.dumps(case)))
        if case.model == "softmax" and case.task.name == "retrieval":
            raise MemoryError("can't allocate memory")
        return lra.take_steps(case, *how[:-1])

    monkeypatch.setattr(measure, "apart", here)
    shorter = [f"tasks.{name}.max_length={length}" for name, length in (("listops", 40), ("retrieval", 24))]
    sizes = [f"model.{name}={size}" for name, size in TINY.items()]
    configs = [str(ROOT / f"yamls/lra/{name}.yaml") for name in ("lion-s", "softmax")]
    given = ["--tasks", "listops,retrieval", "--microbatch", "16", "--device", "cpu", "--out", str(tmp_path)]
    lra.main([*configs, *shorter, *sizes, *given])
    rows = json.loads((tmp_path / "lra-cpu.json").read_text())["rows"]
    assert [(row["task"], row["model"]) for row in rows] == [
        (task, model) for task in ("listops", "retrieval") for model in ("lion-s", "softmax")
    ]
    *measured, failed = rows
    assert failed["error"] == "can't allocate memory" and "step_s" not in failed
    assert all(row["step_s"] > row["update_s"] > 0 and row["peak_gb"] >= 0 and row["finite"] for row in measured)
    assert [case.sizes for case in seen[::2]] == [[16, 16, 16, 2], [16, 16]]
    assert [(row["batch"], row["tokens"], row["samples_timed"]) for row in measured] == [(50, 40, 32)] * 2 + [
        (32, 48, 32)
    ]
    assert all(row["parameters"] > 0 and row["a100_hours_per_epoch"] > 0 for row in rows)
    written = (tmp_path / "lra-cpu.md").read_text()
    assert written.strip() in capsys.readouterr().out
    assert "32 × 2 × 24 (16) | failed" in " ".join(written.split())
    assert (tmp_path / "lra-cpu.png").stat().st_size > 1000


def test_the_microbatch_of_a_recipe_and_what_is_computed_again_follow_from_its_length_on_a_cpu():
    lra = importlib.import_module("benchmarks.lra")

    def cases(device: str, *overrides: str) -> dict[str, tuple[int, bool]]:
        a = SimpleNamespace(tasks=[], device=device, microbatch=None)
        found = lra.cases_of(str(ROOT / "yamls/lra/lion-s.yaml"), list(overrides), a)
        return {case.task.name: (case.microbatch, case.config.activation_checkpointing) for case in found}

    assert cases("cpu", "tasks.text.microbatch_size=3") == {
        "listops": (16, False), "text": (3, False), "retrieval": (4, False), "image": (32, False),
        "pathfinder": (32, False), "pathx": (2, True),
    }  # fmt: skip
    on_gpu = cases("cuda")
    assert {name: size for name, (size, _) in on_gpu.items()} == {n: task.batch_size for n, task in LRA.items()}
    assert not any(again for _, again in on_gpu.values())


@pytest.mark.parametrize(
    "task, model, products",
    [
        ("listops", {"mixer": "lion-d"}, 2 * 16 * (128 + 16)),  # chunks of 128 tokens, and two states of 8
        ("retrieval", {"mixer": "softmax"}, 2 * 16 * 4000),
        ("pathfinder", {"mixer": "lion-d", "attention_form": "full"}, 2 * 16 * 1024),
    ],
)
def test_the_work_of_a_recipe_is_counted(task, model, products):
    lra, task = importlib.import_module("benchmarks.lra"), LRA[task]
    config = SimpleNamespace(model={**TINY, "mlp": "geglu", "norm": "pre", **model}, activation_checkpointing=False)
    built = build_model(build_settings(task, config, {}), None, config)
    D, W, sequences = 16, 32, 2 if task.pairs else 1
    per_token = D * 3 * D + D * D + D * 2 * W + W * D + products  # q, k, v; output; MLP and its gate
    head = D * len(task.labels) + (4 * D * D if task.pairs else 0)
    value = D if task.inputs == "values" else 0
    work, tokens = lra.count_work(built, task), sequences * task.max_length
    assert work.operations == 6 * (tokens * (per_token + value) + head)
    assert work.bytes == 2 * tokens * 84 * D
    assert lra.a100_seconds(lra.Work(312e12, 0), 0.5) == 2
    assert lra.a100_seconds(lra.Work(1, 3e12), 0.5) == 2


def test_the_loader_is_timed_with_and_without_packing_and_workers_and_beside_a_step(tmp_path, shards, tokenizer_folder):
    output = benchmark(
        "dataloader", tmp_path, "--data_local", shards, "--tokenizer_name", tokenizer_folder, "--max_seq_len", 16,
        "--loader_batch", 8, "--workers", 0, 1, "--seconds", 0.1, *STEP.split(), "--device", "cpu",
    )  # fmt: skip
    *loaders, step = json.loads((tmp_path / "dataloader-cpu.json").read_text())["rows"]
    assert [(row["kind"], row["packing"], row["workers"]) for row in loaders] == [
        ("text", packing, workers) for packing in (False, True) for workers in (0, 1)
    ]
    assert all(row["samples_per_second"] > 0 for row in (*loaders, step))
    assert all(0 <= row["padding"] < 1 for row in loaders)
    assert (tmp_path / "dataloader-cpu.md").read_text().strip() in output


def test_the_padding_benchmark_times_both_on_the_same_texts(tmp_path, tokenizer_folder):
    glue, sizes = write_glue(tmp_path / "glue"), "--layers 1 --hidden 64 --batch 4 --steps 3 --device cpu".split()
    benchmark("finetune_padding", tmp_path, "--glue_dir", glue, "--tokenizer", tokenizer_folder, *sizes)
    longest, fixed = json.loads((tmp_path / "finetune-padding-cpu.json").read_text())["rows"]
    assert longest["tokens"] < fixed["tokens"] == 128
    assert longest["ratio"] == 1 and fixed["ratio"] > 0
    assert fixed["epoch_s"] == pytest.approx(6 * fixed["ms"] / 1000)


def test_the_reading_benchmark_compares_tokens_that_are_kept_with_tokenizing_each_batch(tmp_path, tokenizer_folder):
    output = benchmark("glue_reading", tmp_path, "--tokenizer", tokenizer_folder, "--scale", 0.002)
    (seconds,) = json.loads((tmp_path / "glue-reading-sst2-cpu.json").read_text())["rows"]
    assert seconds.keys() == {"read", "keep", "open", "pad", "tokenize"} and min(seconds.values()) > 0
    assert "137 examples, of which 135 to train on" in output and "9 batches of 16" in output


def test_conversion_is_timed_in_both_modes_beside_a_plain_loop(tmp_path, tokenizer_folder):
    sizes = "--megabytes 0.05 --workers 1 --rounds 1".split()
    output = benchmark("convert", tmp_path, "--tokenizer", tokenizer_folder, *sizes)
    rows = json.loads((tmp_path / "convert-cpu.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["plain loop", "max_seq_len, 1 worker", "concat_tokens, 1 worker"]
    assert all(row["megabytes_per_second"] > 0 for row in rows)
    assert (tmp_path / "convert-cpu.md").read_text().strip() in output


@pytest.mark.parametrize(
    "form, decay, card, which",
    [
        ("chunkwise", "token", 80, {"dk", "decay_gradients"}),
        ("chunkwise", "token", 90, {"sums", "states", "scan", "dk"}), ("chunkwise", "hydra", 90, {"sums", "y", "decay_gradients"}),
        ("full, dropout", "token", 90, {"y"}), ("full", "none", 90, {"dk"}),
        ("full, rows divided", "token", 90, {"rows", "dk"}), ("full, two orders", "token", 90, {"sums", "y", "dk"}),
    ],
)  # fmt: skip
def test_the_kernels_compile_and_keep_their_numbers_in_registers(form, decay, card, which):
    """What Triton's interpreter accepts the compiler need not. Heads of 64 in bfloat16; benchmarks/kernels.py compiles
    all."""
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks import kernels

    launches = kernels.launches(form, decay, torch.bfloat16, 64, 64, card=card)
    distinct = {start.kernel.name: start for start in launches}
    states = {"states", "grad_states", "scan"} if form == "chunkwise" else set()
    of_decays = {"sums", "decay_gradients"} if decay != "none" else set()
    of_rows = {"rows"} if "rows" in form or "orders" in form else set()
    assert set(distinct) == {"y", "dq", "dk", *of_decays, *states, *of_rows}
    for name in which:
        needs = kernels.compiled(distinct[name], card)
        assert needs["spilled"] <= 128, name
        assert needs["programs"] >= 2 and needs["serialized"] == 0, name
        if name in ("y", "dk"):
            assert needs["from_registers"] + needs["from_shared"] >= 6 and needs["instructions"]


def test_the_time_of_launches_is_measured_without_a_gpu(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    output = benchmark("kernels", tmp_path, "--host", "--decays", "token")
    rows = json.loads((tmp_path / "kernels-host.json").read_text())["rows"]
    assert [row["launches"] for row in rows] == [5, 5, 6, 5, 5, 6, 5]  # 128 tokens are one chunk
    assert all(0 < row["forward_us"] < row["both_us"] and row["compiled_us"] > 0 for row in rows)
    assert (tmp_path / "kernels-host.md").read_text().strip() in output


def test_the_operations_of_a_step_on_a_gpu_are_counted_without_one(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    models = ["--texts", "softmax", "lion-s", "hydra", "--images", "lion-s", "lion-s-natural"]
    output = benchmark("launches", tmp_path, *models, "--layers", 2)
    rows = json.loads((tmp_path / "launches.json").read_text())["rows"]
    counts = {(row["what"], row["model"]): (row["forward"] + row["backward"], row["kernels"]) for row in rows}
    softmax, lion, hydra, image, natural = counts.values()
    assert (softmax[1], lion[1], hydra[1], image[1], natural[1]) == (0, 10, 30, 72, 72)
    assert lion[0] < 1.4 * softmax[0] < hydra[0] and image[0] < natural[0] < 1.4 * image[0]
    assert all(row["bytes"] == sum(row["bytes by kind"].values()) > 1e9 for row in rows)
    assert (tmp_path / "launches.md").read_text().strip() in output


def test_what_operations_read_and_write_is_counted():
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks.launches import Operations

    x, y = torch.zeros(4, 8), torch.zeros(4, 8)
    with Operations() as operations:
        x + x[:1].expand(4, 8)  # 128, 32 and 128 bytes
        torch.mul(x, 2, out=y)
        y.sub_(1)
        y.copy_(x).zero_()
        torch.embedding(x, torch.arange(3))
    counted = {"add": 288, "mul": 256, "sub_": 256, "copy_": 256, "zero_": 128, "arange": 24, "embedding": 216}
    assert operations.bytes == counted and operations.count == 7


def test_the_first_steps_on_a_card_run_in_small_on_a_cpu(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    out = tmp_path / "card"
    steps = "card compile correctness profile sweep ptxas sanitizer".split()
    program = """
import os, runpy, sys
os.environ["TRITON_INTERPRET"] = "1"
import quick_interpreter
quick_interpreter.install()
del os.environ["TRITON_INTERPRET"]  # the program sets it
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command = [sys.executable, "-c", program, ROOT / "benchmarks/first_card.py", "--device", "cpu", "--out", out]
    own = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    done = subprocess.run([*command, "--steps", *steps], cwd=ROOT, env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (out / "summary.md").read_text()
    assert summary.strip() in done.stdout and all(f"| {step} " in summary for step in steps)
    checks = {step: json.loads((out / f"{step}.json").read_text()) for step in steps}
    assert sum(check["passed"] is True for check in checks["correctness"]) > 90
    assert [check["what"] for name in ("compile", "ptxas", "sanitizer") for check in checks[name]] == ["skipped"] * 3
    assert "Self CPU" in (out / "profile-hydra.txt").read_text() and len(checks["profile"]) == 24
    assert "tiles (9, 0): {'y': (" in done.stdout  # to paste


def test_looking_for_a_gpu_leaves_it_to_the_processes_of_the_steps(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    program = """
import multiprocessing, os, torch
from benchmarks import first_card
first_card.has_gpu()
step = multiprocessing.get_context("fork").Process(target=lambda: os._exit(torch.cuda._is_in_bad_fork()))
step.start()
step.join()
print(step.exitcode)
"""
    done = plain.run([sys.executable, "-c", program], cwd=ROOT, env=environment(HF_HUB_OFFLINE="1"))
    assert done.stdout.split() == ["0"], done.stderr


def test_a_step_that_fails_or_takes_too_long_is_named_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks import first_card

    def wrong(report, a):
        report.check("numbers", "3 of 4", False)

    def broken(report, a):
        raise ValueError("no such kernel")

    def slow(report, a):
        report.check("begun", "yes")
        time.sleep(60)

    steps = {name: first_card.Step(run, 2) for name, run in (("wrong", wrong), ("broken", broken), ("slow", slow))}
    monkeypatch.setattr(first_card, "STEPS", steps)
    with pytest.raises(SystemExit, match="1"):
        first_card.main(["--device", "cpu", "--out", str(tmp_path)])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (tmp_path / "summary.md").open()][2:]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("wrong", "0", "numbers"),
        ("broken", "0", "broken: ValueError: no such kernel"),
        ("slow", "1", "slow: stopped after 2 s"),
    ]
    assert "FAILED  numbers: 3 of 4" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        first_card.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0.01", "--steps", "slow", "wrong"])
    summary = (tmp_path / "summary.md").read_text()
    assert "slow: stopped after 1 s" in summary and "not run, since the 0.01 minutes are over" in summary


def test_a_case_of_a_later_step_is_run_once_to_compile_its_kernels():
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks import first_card

    assert first_card.run_once(("operator", ("full", "hydra", 8, True, 1, 2, 8, "float32", 8, "cpu"))) is None
    assert "no_such_form" in first_card.run_once(("correctness", ("no_such_form", "token", "plain", 4, 1, 1, "cpu")))


def test_sparse_bert_has_the_loss_of_bert():
    dense, sparse = (models.build(name, 1, 64, 16, masked_lm=True).eval() for name in (models.BERT, models.SPARSE_BERT))
    sparse.load_state_dict(dense.state_dict())
    ids = torch.randint(5, 100, (2, 16))
    labels = ids.masked_fill(torch.rand(2, 16) > 0.4, -100)
    losses = [models.masked_lm_loss(model, ids, labels, labelled_positions(labels)) for model in (dense, sparse)]
    torch.testing.assert_close(*losses)
    assert (models.is_sparse(dense), models.is_sparse(sparse)) == (False, True)


def test_kernels_are_compiled_once_for_texts_of_all_lengths():
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks import kernels

    for form, decay in [*((form, "token") for form in kernels.FORMS), ("chunkwise", "hydra")]:
        launches = [kernels.launches(form, decay, torch.bfloat16, 64, 64, length) for length in (240, 245, 256)]
        assert all(
            len({repr(kernels.specialized(start)) for start in same}) == 1 for same in zip(*launches, strict=True)
        )
