"""The benchmarks run, and write what they say, at sizes where their numbers mean nothing."""

import importlib
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import warm
from glue_files import write_glue

from benchmarks import measure, models
from src.errors import UserError

STEP = "--layers 1 --hidden 64 --batch 2"
# What is given to a command, and the name of what it writes.
SMALL = {
    "operator": (
        "--lengths 16 40 --tokens 64 --forms chunkwise --heads 2 --head_dim 8 --rounds 1", "operator-cpu-2-heads",
    ),
    "inference": (
        "--models 'Hugging Face BERT' softmax lion-s-plus hydra --lengths 16 40 --batch 1 2 --layers 1 --hidden 64 "
        "--rounds 1 --dtype bfloat16", "inference-cpu-bfloat16",
    ),
    "embed": (
        "--models lion-s --lengths 24 40 80 --once_above 40 --layers 1 --hidden 64 --rounds 1 --dtype bfloat16",
        "embed-cpu",
    ),
    "train_step": (
        "--models 'Hugging Face BERT' 'Hugging Face ModernBERT' softmax hydra yamls/ablation/lion-d-rope.yaml "
        f"{STEP} --rounds 1 --precision amp_bf16",
        "train-step-cpu-amp_bf16",
    ),
    "vision": (
        "--models 'Hugging Face ViT' 'timm DeiT' lion-s-natural --train_size tiny --train_pixels 32 --batch 2 "
        "--pixels 32 48 --rounds 1",
        "vision-cpu",
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
        names = ["Hugging Face BERT", "Hugging Face ModernBERT", "softmax", "hydra", "lion-d-rope"]
        assert [row["model"] for row in written["rows"]] == names
        assert all(row["ms"] > 0 and row["floor_ms"] > 0 for row in written["rows"])
        assert (tmp_path / f"{stem}.png").stat().st_size > 1000


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
    measure.interleaved(cases, "cpu", 9, 0, least=1, warm_up=False, after=lambda: ends.append(len(runs)))
    assert (runs, ends) == (["a", "b"], [1, 2])
    runs.clear()
    measure.interleaved(cases, "cpu", 9, 0)
    assert runs == ["a", "b"] * 4


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


def test_the_kernels_do_not_compute_hydra():
    operator = importlib.import_module("benchmarks.operator")
    with_hydra = {form for form in operator.LONGEST["cuda"] if "hydra" in operator.variants(form, "cuda")}
    assert {"pytorch-full", "pytorch-chunkwise"} <= with_hydra
    assert not with_hydra & {"full", "chunkwise", "softmax-cudnn", "fla"}
    assert all("hydra" in operator.variants(form, "cpu") for form in operator.FORMS["cpu"])


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
    assert longest["ratio"] == 1 < fixed["ratio"]
    assert fixed["epoch_s"] == pytest.approx(6 * fixed["ms"] / 1000)


def test_conversion_is_timed_in_both_modes_beside_a_plain_loop(tmp_path, tokenizer_folder):
    sizes = "--megabytes 0.05 --workers 1 --rounds 1".split()
    output = benchmark("convert", tmp_path, "--tokenizer", tokenizer_folder, *sizes)
    rows = json.loads((tmp_path / "convert-cpu.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["plain loop", "max_seq_len, 1 worker", "concat_tokens, 1 worker"]
    assert all(row["megabytes_per_second"] > 0 for row in rows)
    assert (tmp_path / "convert-cpu.md").read_text().strip() in output


@pytest.mark.parametrize(
    "form, card, which", [("chunkwise", 80, "key_gradients"), ("chunkwise", 90, ""), ("full, dropout", 90, "output")]
)
def test_the_kernels_compile_and_keep_their_numbers_in_registers(form, card, which):
    """What Triton's interpreter accepts the compiler need not. Heads of 64 in bfloat16; benchmarks/kernels.py compiles
    all."""
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks import kernels

    launches = kernels.launches(form, "token", torch.bfloat16, 64, 64)
    distinct = {(start.name, start.options.get("SIGN")): start for start in launches}
    # sums, the output and three gradients; and states of keys and of queries, and their scan
    assert len(distinct) == (8 if form == "chunkwise" else 5)
    for (name, _), start in distinct.items():
        if which in name:
            needs = kernels.compiled(start, card)
            assert needs["spilled"] <= 128, name
            assert needs["shared"] <= kernels.SHARED[card] // 2, name  # two programs a multiprocessor at least


def test_kernels_are_compiled_once_for_texts_of_all_lengths():
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks import kernels

    for form in kernels.FORMS:
        launches = [kernels.launches(form, "token", torch.bfloat16, 64, 64, length) for length in (240, 245, 256)]
        assert all(
            len({repr(kernels.specialized(start)) for start in same}) == 1 for same in zip(*launches, strict=True)
        )
