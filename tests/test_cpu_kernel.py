"""The kernel in C: outputs and gradients against the definition in float64, whatever the vectors of the processor, and
what happens where it cannot be compiled."""

import itertools
import os

import pytest
import torch

from src.lion import cpu, cpu_kernel, linear_attention, machine, two_sided_attention
from src.lion.cpu import draw_kept
from src.lion.linear_attention import signed_sums
from src.lion.linear_attention_forms import cumulative_log_decay
from src.lion.two_sided_attention import definition as two_sided_definition
from tests import test_channel_decay as by_channel
from tests import test_patch_orders as by_order
from tests import test_two_sided_attention as two_sided
from tests.test_linear_attention import distance, draw, outputs_and_gradients, reference

FORMS = "full", "chunkwise"
VECTORS = {"widest": [], "AVX2": ["-mno-avx512f"], "SSE": ["-mno-avx512f", "-mno-avx2", "-mno-avx", "-mno-fma"]}


@pytest.fixture
def kernel(monkeypatch):
    """The kernel, or a skip where there is none."""
    monkeypatch.setattr(cpu_kernel, "USE_NATIVE", True)
    if not cpu_kernel.is_available():
        pytest.skip(f"no kernel{cpu_kernel.reason()}")


@pytest.fixture(params=VECTORS)
def vectors(request, monkeypatch, kernel):
    """The kernel compiled for smaller vectors."""
    if VECTORS[request.param] and os.uname().machine != "x86_64":
        pytest.skip("smaller vectors of x86 only")
    monkeypatch.setattr(cpu_kernel, "FLAGS", cpu_kernel.FLAGS + VECTORS[request.param])
    forget = cpu_kernel._library.cache_clear
    forget()
    yield
    forget()


@pytest.fixture
def runs(monkeypatch):
    """The names of the functions that the kernel ran."""
    library, names = cpu_kernel._library(), []

    class Spy:
        def __getattr__(self, name: str):
            names.append(name)
            return getattr(library, name)

    monkeypatch.setattr(cpu_kernel, "_library", lambda: Spy())
    return names


def check(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for number, (x, exact) in enumerate(zip(actual, expected, strict=True)):
        if exact.any():  # a head's decay gets the small difference of large numbers
            assert distance(x, exact) < (1e-4 if exact.ndim == 1 else 1e-5), number
        else:
            assert x.abs().max() < 1e-5, number


@pytest.mark.parametrize("sizes", [(4, 6), (33, 65), (64, 64)])
@pytest.mark.parametrize("length", [1, 2, 16, 31, 33, 70, 200])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_with_vectors_of_any_width(form, length, sizes, vectors):
    for decay, mask in (("head", "none"), ("token", "holes"), ("token", "left")):
        case = decay, length, 2, 3, mask, False, 0, *sizes
        inputs, mask = draw(*case)
        inputs = [x.float() for x in inputs]
        check(outputs_and_gradients(linear_attention, inputs, mask=mask, form=form), reference(*case))


@pytest.mark.parametrize("kind", ["head", "token", "causal", "packed", "given", "dropout"])
@pytest.mark.parametrize("length, sizes", [(2, (4, 6)), (33, (4, 6)), (70, (24, 64))])
def test_rows_are_divided_by_their_sums(length, sizes, kind, vectors, runs):
    q, k, v, log_decay = draw("head" if kind == "head" else "token", length, positive=True, d=sizes[0], e=sizes[1])[0]
    _, mask = draw("head", length, mask="holes")
    options = {
        "causal": {"causal": True, "mask": mask},
        "packed": {"seq_idx": (torch.arange(length) // 9).expand(2, -1)},
        "given": {"log_decay_future": 0.5 * log_decay, "mask": mask},
        "dropout": {"dropout_p": 0.3},
    }.get(kind, {"mask": mask})
    results = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        inputs, how = [x.to(dtype) for x in (q, k, v, log_decay)], {"form": "full", "normalize": True, **options}
        if kind == "given":
            how["log_decay_future"] = how["log_decay_future"].to(dtype)
        results.append(outputs_and_gradients(linear_attention, inputs, **how))
        assert ("lion_full" in runs) == (dtype == torch.float32)
    check(*reversed(results))


@pytest.mark.parametrize("kind", ["d", "s"])
@pytest.mark.parametrize("read", ["both", "columns"])
@pytest.mark.parametrize("batch, heads, grid", [(1, 1, (1, 1)), (2, 3, (5, 3)), (3, 2, (4, 8)), (1, 2, (9, 11))])
@pytest.mark.parametrize("form", FORMS)
def test_patches_in_several_orders(form, batch, heads, grid, read, kind, vectors, runs):
    inputs, orders = by_order.draw(batch, heads, grid, kind, torch.float64, read=read)
    expected = outputs_and_gradients(by_order.definition_in_orders, inputs, orders=orders)
    inputs = [x.float() for x in inputs]
    how = {"orders": orders, "form": form}
    check(outputs_and_gradients(by_order.linear_attention_in_orders, inputs, **how), expected)
    kernel = "lion_full" if form == "full" else "lion_triangle"
    sums = set() if form == "full" else {"lion_sums", "lion_sums_gradient"}
    assert set(runs) == {"lion_are_orders", kernel} | sums


def test_any_number_of_orders_of_any_integers(kernel):
    for kind, count in itertools.product("ds", (1, 3)):
        (q, k, v, log_decay), _ = by_order.draw(2, 3, (5, 7), kind, torch.float64, read="raster")
        orders = torch.stack([torch.randperm(36) for _ in range(count)]).int()
        inputs = [x.detach() for x in (q, k, v, log_decay.repeat(*[1] * (kind == "s"), count, *[1] * (kind == "s")))]
        expected = outputs_and_gradients(by_order.definition_in_orders, inputs, orders=orders.long())
        for form in FORMS:
            how = {"orders": orders, "form": form}
            wide = outputs_and_gradients(by_order.linear_attention_in_orders, inputs, **how)
            check(wide, expected)
            check(outputs_and_gradients(by_order.linear_attention_in_orders, [x.float() for x in inputs], **how), wide)


def test_shared_keys_strided_and_expanded_operands_with_divided_rows(kernel, runs):
    qk = torch.rand(2, 40, 2, 1, 6, dtype=torch.float64)
    q, k = (x.transpose(1, 2) for x in qk.unbind(2))
    v, log_decay = torch.randn(2, 40, 3, 5).double().transpose(1, 2), -torch.rand(2, 3, 1).double().expand(-1, -1, 40)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        decays = log_decay[..., :1].detach().to(dtype).requires_grad_()
        y = linear_attention(*inputs, decays.expand(-1, -1, 40), normalize=True, form="full")
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [*inputs, decays])]

    check(results(torch.float32), results(torch.float64))
    assert runs.count("lion_full") == 2


@pytest.mark.parametrize("wrong", [-1, 10, 3])
def test_orders_that_leave_out_a_token_are_refused(wrong, kernel):
    inputs, orders = by_order.draw(1, 2, (3, 3), "d", torch.float32)
    orders[1, 4] = wrong
    with pytest.raises(ValueError, match="every token from 0 to 9 once"):
        by_order.linear_attention_in_orders(*inputs, orders)


@pytest.mark.parametrize("sizes", [(5, 33), (24, 16)])
def test_decays_per_channel_with_vectors_of_any_width(sizes, vectors, runs):
    for decay, length in (("head", 70), ("token", 33), ("strong", 96)):
        inputs, mask = by_channel.draw(decay, length, mask="holes", d=sizes[0], e=sizes[1])
        inputs = [x.float() for x in inputs]
        expected = outputs_and_gradients(by_channel.definition, [x.double() for x in inputs], mask=mask)
        runs.clear()
        check(outputs_and_gradients(linear_attention, inputs, mask=mask), expected)
        assert runs == ["lion_channels"] * 2 + ["lion_channels_gradient"] * 2


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("batch, length", [(1, 1), (2, 33), (1, 300)])
@pytest.mark.parametrize("structure", two_sided.STRUCTURES)
@pytest.mark.parametrize("form", FORMS)
def test_all_kinds_of_triangles(form, structure, batch, length, groups, kernel, runs):
    tensors, mask = two_sided.draw(structure, length, batch, groups=groups, mask="holes")
    expected = two_sided.outputs_and_gradients(two_sided_definition, structure, tensors, mask=mask)
    inputs = [x.float() for x in tensors]
    check(two_sided.outputs_and_gradients(two_sided_attention, structure, inputs, mask=mask, form=form), expected)
    separate = structure in ("hydra", "scans")  # their matrix is left to PyTorch
    assert set(runs) == ({"lion_triangle"} if form == "chunkwise" else set() if separate else {"lion_full"})


@pytest.mark.parametrize("kernel_used", [False, True])
@pytest.mark.parametrize("shape", [(3,), (1, 3, 1), (2, 3, 70), (4, 3, 3000)])
def test_sums_of_decays_and_their_gradients(shape, kernel_used, kernel, runs, monkeypatch):
    monkeypatch.setattr(cpu_kernel, "USE_NATIVE", kernel_used)
    log_decay = torch.randn(shape).sub(1).mul(20).clamp(max=0).requires_grad_()  # some below the least
    length = shape[-1] if len(shape) == 3 else 70
    sums = signed_sums(log_decay, length)
    exclusive, inclusive = cumulative_log_decay(exact := log_decay.detach().clone().requires_grad_(), length)
    expected = torch.stack([exclusive, -inclusive], -1)
    assert torch.equal(sums, expected)
    grad = torch.randn(2, *sums.shape[:-1], dtype=sums.dtype).movedim(0, -1)
    sums.backward(grad)
    expected.backward(grad)
    assert log_decay.grad.shape == shape
    torch.testing.assert_close(log_decay.grad, exact.grad, atol=1e-4, rtol=1e-5)
    assert runs == ["lion_sums", "lion_sums_gradient"] * kernel_used


@pytest.mark.parametrize("decay", ["none", "head", "token"])
def test_dropout_keeps_the_same_entries_with_and_without_the_kernel(decay, kernel, runs, monkeypatch):
    (q, k, v, log_decay), mask = draw(decay, 70, mask="right")
    kept = draw_kept((2, 3, 70, 70), 0.25, q.device)
    monkeypatch.setattr(cpu, "draw_kept", lambda *_: kept)
    monkeypatch.setattr(cpu, "dropout", lambda x, _: x * kept[0] * kept[1])
    runs.clear()
    expected = outputs_and_gradients(linear_attention, [q, k, v, log_decay], mask=mask, dropout_p=0.25)
    assert not runs  # float64
    inputs = [None if x is None else x.float() for x in (q, k, v, log_decay)]
    check(outputs_and_gradients(linear_attention, inputs, mask=mask, dropout_p=0.25), expected)
    assert "lion_full" in runs


def test_bits_do_not_depend_on_the_number_of_threads(kernel):
    def results(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        inputs = [x.float() for x in draw("token", 300)[0]]
        options = [{"form": "chunkwise"}, {"form": "full", "dropout_p": 0.1}]
        kept = draw_kept((500_001,), 0.1, torch.device("cpu"))[0]
        found = [x for one in options for x in outputs_and_gradients(linear_attention, inputs, **one)]
        for decay in ("head", "token"):
            inputs = [x.float() for x in by_channel.draw(decay, 300)[0]]
            found += outputs_and_gradients(linear_attention, inputs)
        return [*found, kept]

    before = torch.get_num_threads()
    try:
        assert all(torch.equal(*pair) for pair in zip(results(1), results(3)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "form, size, case",
    [
        *itertools.product(["full"], [20], ["plain", "bfloat16", "normalized", "causal", "diagonal", "dropout"]),
        *itertools.product(["chunkwise"], [48, 64, 128], ["plain", "bfloat16", "normalized", "causal", "diagonal"]),
    ],
)
def test_parts_of_a_head_have_the_bits_of_the_whole(form, size, case, vectors, runs, monkeypatch):
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    generator = torch.Generator().manual_seed(0)
    # As a layer has them: parts of one projection.
    q, k, v = torch.randn(2, 100, 3, 3, size, generator=generator).to(dtype).permute(2, 0, 3, 1, 4).unbind()
    log_decay = -torch.rand(2, 3, 100, generator=generator)
    tensors, _ = two_sided.draw("lion", 100, heads=3)
    _, *of_sides, diagonal = (x.float() for x in tensors)
    sides = two_sided.triangles("lion", *of_sides)
    options = {"causal": {"causal": True}, "normalized": {"normalize": True}, "dropout": {"dropout_p": 0.2}}

    def result(parts: int, threads: int) -> torch.Tensor:
        monkeypatch.setattr(cpu_kernel, "_parts", lambda *given: parts)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        torch.manual_seed(0)
        if case == "diagonal":
            return two_sided_attention(v, *sides, diagonal, form=form)
        return linear_attention(q, k, v, log_decay, form=form, **options.get(case, {}))

    whole = result(1, 1)
    assert all(torch.equal(result(parts, 3), whole) for parts in (2, 4, 8))
    assert ("lion_full" if form == "full" else "lion_triangle") in runs


@pytest.mark.parametrize(
    "form, size, expected",
    [
        ("full", 64, {1: 4, 2: 4, 3: 2, 12: 2, 64: 1}),
        ("chunkwise", 64, {1: 4, 2: 4, 4: 2, 12: 1}),
        ("chunkwise", 65, {1: 5, 4: 2}),
        ("chunkwise", 16, {1: 1}),
    ],
)
def test_heads_are_cut_where_threads_would_have_nothing_to_do(form, size, expected, kernel, monkeypatch):
    found, choose = [], cpu_kernel._parts

    def record(*given) -> int:
        found.append(choose(*given))
        return found[-1]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(cpu_kernel, "_parts", record)
    for heads, parts in expected.items():
        inputs = [x.float() for x in draw("token", 128, 1, heads, d=64, e=size)[0]]
        linear_attention(*inputs, form=form)
        assert set(found) == {parts}, heads
        found.clear()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9999])
def test_kept_entries_are_independent_and_as_many_as_asked_for(share, kernel, runs):
    torch.manual_seed(0)
    kept, factor = draw_kept((1000, 1001), share, torch.device("cpu"))
    assert "lion_keep" in runs
    assert set(kept.unique().tolist()) <= {0, 1}
    assert factor == pytest.approx(1 / (1 - round(share * 2**16) / 2**16))
    deviation = (share * (1 - share) / kept.numel()) ** 0.5
    centered = kept.double() - (1 - round(share * 2**16) / 2**16)
    assert abs(centered.mean()) <= 4 * deviation
    for distance_apart in (1, 2, 4, 1001):
        flat = centered.flatten()
        assert abs((flat[distance_apart:] * flat[:-distance_apart]).mean()) <= 5 * share * (1 - share) / 1000


def test_nan_and_infinity_are_seen(kernel):
    for value in (float("nan"), float("inf")):
        for form in FORMS:
            q, k, v, log_decay = (x.float() for x in draw("token", 40)[0])
            v[0, 0, 20] = value
            y = linear_attention(q, k, v, log_decay, form=form)
            assert not y[0, 0, 20].isfinite().any() and y[1:].isfinite().all() and y[0, 1:].isfinite().all()


@pytest.fixture
def compiled_in(tmp_path, monkeypatch, caplog):
    """A function that loads the kernel with an empty cache, and says whether it is there; results must be right."""
    monkeypatch.setattr(cpu_kernel, "USE_NATIVE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def load() -> bool:
        cpu_kernel._library.cache_clear()
        inputs = draw("head", 70)[0]
        y = linear_attention(*(x.float() for x in inputs))
        assert distance(y, linear_attention(*inputs)) < 1e-5
        return cpu_kernel.is_available()

    yield load
    cpu_kernel._library.cache_clear()


def test_without_a_compiler_pytorch_computes_the_same_and_says_so_once(compiled_in, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not compiled_in()
    assert caplog.text.count("computed in PyTorch") == 1 and "no-such-compiler" in caplog.text
    assert "no C compiler no-such-compiler; install one, or set CC to one" in cpu_kernel.reason()
    monkeypatch.setattr(cpu_kernel, "USE_NATIVE", False)  # LION_NATIVE=0
    assert not compiled_in() and cpu_kernel.reason() == " (LION_NATIVE=0)"
    assert not list(tmp_path.rglob("*.so"))


def test_without_a_compiler_a_kernel_in_the_cache_is_used(compiled_in, monkeypatch, caplog, kernel):
    assert compiled_in()
    built = cpu_kernel.version()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiled_in() and cpu_kernel.version() == built and not caplog.text
    monkeypatch.setattr(cpu_kernel, "FLAGS", [*cpu_kernel.FLAGS, "-DOTHER"])  # a kernel of another version of this file
    assert not compiled_in() and "no C compiler no-such-compiler" in caplog.text


def test_a_source_that_does_not_compile_is_reported_by_its_first_error(compiled_in, monkeypatch, caplog, kernel):
    monkeypatch.setattr(cpu_kernel, "SOURCE", "int lion_full(void) { return missing; }")
    assert not compiled_in()
    assert "missing" in caplog.text and "error" in caplog.text


def test_a_damaged_kernel_is_compiled_again(compiled_in, tmp_path, monkeypatch, kernel):
    assert compiled_in()
    (compiled,) = tmp_path.rglob("*.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))  # this process has loaded the first
    damaged = tmp_path / "other" / "lion-bert" / compiled.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(compiled.read_bytes()[:-20_000])  # loading it would end this process
    assert compiled_in()
    assert damaged.stat().st_size == compiled.stat().st_size


def test_a_kernel_that_must_not_be_loaded_stays_and_the_way_out_is_named(compiled_in, tmp_path, monkeypatch, caplog):
    def refuse(path):
        raise OSError(f"{path}: failed to map segment from shared object: Operation not permitted")

    monkeypatch.setattr(cpu_kernel, "SOURCE", "int unused;")
    monkeypatch.setattr(cpu_kernel.ctypes, "CDLL", refuse)  # as on a disk whose files may not be executed
    times = set()
    for _ in range(2):
        assert not compiled_in() and "set XDG_CACHE_HOME to a folder whose programs may be executed" in caplog.text
        times.add(next(tmp_path.rglob("*.so")).stat().st_mtime_ns)
    assert len(times) == 1


def test_a_cache_of_another_user_names_the_way_out(compiled_in, monkeypatch, caplog):
    monkeypatch.setattr(machine.os, "getuid", lambda: 12345)
    assert not compiled_in() and "belongs to another user; set XDG_CACHE_HOME" in caplog.text


def test_a_cache_that_cannot_be_written_costs_only_speed(compiled_in, tmp_path, caplog):
    (tmp_path / "lion-bert").touch()
    assert not compiled_in() and "cannot be created (File exists); set XDG_CACHE_HOME" in caplog.text


def test_other_users_cannot_place_a_kernel(compiled_in, tmp_path, caplog):
    (tmp_path / "lion-bert").mkdir()
    (tmp_path / "lion-bert").chmod(0o777)
    assert not compiled_in() and "chmod 700" in caplog.text


def test_a_run_that_began_without_the_kernel_continues_without(kernel):
    machine.adopt({"native": False})
    assert not cpu_kernel.is_available()


# What the models do not do, and a caller may


@pytest.mark.parametrize("form", FORMS)
def test_transposed_inputs_have_the_results_of_contiguous_ones(form, kernel, runs):
    inputs = [x.float() for x in draw("token", 80, d=24, e=24)[0]]
    expected = outputs_and_gradients(linear_attention, inputs, form=form)
    for number in range(3):
        strided = [x.mT.contiguous().mT if i == number else x for i, x in enumerate(inputs)]
        leaves = [x.detach().requires_grad_() for x in strided]
        y = linear_attention(*leaves, form=form)
        probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
        check([y.detach(), *torch.autograd.grad((y * probe).sum(), leaves)], expected)


@pytest.mark.parametrize("place", [31, 32, 63, 64])
@pytest.mark.parametrize("structure", ["hydra", "scans", "past", "future"])
def test_a_key_of_almost_no_weight_at_the_end_of_a_chunk(structure, place, kernel):
    tensors, mask = two_sided.draw(structure, 100)
    tensors[4][..., place] = tensors[8][..., place] = -60.0  # the log weights of both directions
    expected = two_sided.outputs_and_gradients(two_sided_definition, structure, tensors, mask=mask)
    inputs = [x.float() for x in tensors]
    check(
        two_sided.outputs_and_gradients(two_sided_attention, structure, inputs, mask=mask, form="chunkwise"), expected
    )


@pytest.mark.parametrize("decay", ["none", "head", "token"])
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_summed_in_float32(form, decay, kernel):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 2000, 16, generator=generator).bfloat16() for _ in range(3))
    q, k, v = q - q.mean(-1, keepdim=True), k.abs(), v + 1
    log_decay = {"none": None, "head": torch.tensor([-0.01, -0.001]), "token": -0.01 * torch.rand(1, 2, 2000)}[decay]
    exact = linear_attention(*(x.double() for x in (q, k, v)), None if decay == "none" else log_decay.double())
    if not (form == "full" and decay == "none"):  # a product in bfloat16, as in PyTorch
        assert distance(linear_attention(q, k, v, log_decay, form=form), exact) < 5e-3


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("sizes", [(5, 7), (5, 20), (20, 5)])
@pytest.mark.parametrize("form", FORMS)
def test_a_text_with_nan_leaves_the_others_alone(form, sizes, normalize, kernel, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # whose memory serves one text after the other
    inputs = [x.float() for x in draw("token", 140, batch=3, positive=normalize, d=sizes[0], e=sizes[1])[0]]
    how = {"form": form, "normalize": normalize}
    expected = outputs_and_gradients(linear_attention, inputs, **how)
    for number in (3, 0):  # the decays, then the queries
        inputs[number][0, 0, 40] = float("nan")
        for x, others in zip(outputs_and_gradients(linear_attention, inputs, **how), expected):
            assert x[0, 0].isnan().any() and torch.equal(x[0, 1:], others[0, 1:]) and torch.equal(x[1:], others[1:])


@pytest.mark.parametrize("form", FORMS)
def test_mixed_dtypes_are_refused(form, kernel):
    q, k, v, log_decay = (x.float() for x in draw("token", 40)[0])
    for dtype in (torch.float16, torch.float64):
        with pytest.raises((TypeError, RuntimeError), match=r"dtype|expected scalar type"):
            linear_attention(q.to(dtype), k.to(dtype), v, log_decay, form=form)


def test_fake_tensors_have_the_shape_of_the_result(kernel):
    with torch._subclasses.FakeTensorMode():
        q = torch.randn(1, 2, 40, 8)
        for options in ({"form": "full"}, {"form": "chunkwise"}, {"dropout_p": 0.1}):
            assert linear_attention(q, q, q, torch.zeros(2), **options).shape == q.shape


def test_weights_beyond_the_largest_number_are_infinite(kernel):
    tensors, _ = two_sided.draw("past", 40)
    tensors[4][..., 20] = 100.0
    y = two_sided.run(two_sided_attention, "past", [x.float() for x in tensors], form="chunkwise")
    assert not y[:, :, 21].isfinite().any()
