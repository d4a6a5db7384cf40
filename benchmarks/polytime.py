"""What src/polytime.py is worth: the global fit of a layer of linear attention beside layers that Adam trains, and the
certificate beside what is then learned, after sections 4.1 and 4.2 of arXiv:2410.10101:

    python benchmarks/polytime.py [--parts heads certificate speed]

heads: a layer with one causal head makes up targets for random tokens; the global fit, linear attention with more heads
or layers, and a softmax transformer learn them. The fit is in float64, training in float32. Errors are squared, on
fresh sequences, relative to the targets' square.

certificate: a layer that recalls values by their keys makes up targets; keys and values are Gaussian in some samples
and orthonormal in the others, in which they do not determine the layer. Distances are those to its coefficients.

speed: time of the sums over sequences of 8 tokens, and of the fit.

Takes less than ten minutes on one core of a CPU. Writes tables, their raw numbers and two pictures.
"""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks import measure
from src import cli, plots
from src.config import Rule, check_value
from src.polytime import Moments, coefficients, fit

TOKENS = 100
RATES, DEEP_RATES, SOFTMAX_RATES = (0.01, 0.001), (0.01,), (0.001,)  # the better of two, in short trials
TEST = 512  # sequences
SHARES = (0, 0.95, 0.98, 0.99, 0.995, 0.999, 1)  # of orthonormal samples
KEYS = 4  # of a sample of associative memory; their dimensions
DEEP_HEADS = (1, 4, 16)
GLOBAL, SOFTMAX = "global fit", "softmax transformer"
FACTS = ("part", "share", "seed", "rank", "size", "smallest")  # of a row of the certificate; others are distances


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    parts = {"heads": run_heads, "certificate": run_certificate, "speed": run_speed}
    add("--parts", nargs="+", default=list(parts), choices=parts, help="(default: all)")
    add("--seeds", type=int, default=3, help="teachers, data and initial weights (default: 3)")
    add("--dimensions", type=int, nargs="+", default=[2, 4], help="of a token (default: 2 4)")
    add("--sequences", type=int, nargs="+", default=[512, 1024, 2048], help="to train on (default: 512 1024 2048)")
    add("--heads", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of one layer (default: 1 2 4 8 16)")
    about = f"of deeper models, with {', '.join(map(str, DEEP_HEADS))} heads, on the fewest sequences (default: 2 4)"
    add("--layers", type=int, nargs="+", default=[2, 4], help=about)
    add("--epochs", type=int, default=200, help="of one layer (default: 200)")
    add("--deep_epochs", type=int, default=30, help="of deeper models and the softmax transformer (default: 30)")
    add("--batch", type=int, default=32, help="sequences (default: 32)")
    add("--samples", type=int, default=2**14, help="of associative memory (default: 16384)")
    add("--sample_epochs", type=int, default=50, help="passes over them (default: 50)")
    add("--speed_dimensions", type=int, nargs="+", default=[4, 8, 12, 16], help="(default: 4 8 12 16)")
    add("--speed_sequences", type=int, default=20_000, help="summed (default: 20000)")
    add("--out", type=Path, default=measure.RESULTS, help=f"folder of the results (default: {measure.RESULTS})")
    a = parser.parse_args(argv)
    for name in ("dimensions", "speed_dimensions"):
        for value in getattr(a, name):
            check_value(f"--{name}", value, int, Rule(at_least=1, at_most=24))
    for name in ("sequences", "heads", "layers"):
        for value in getattr(a, name):
            check_value(f"--{name}", value, int, Rule(at_least=1))
    for name in ("seeds", "epochs", "deep_epochs", "batch", "samples", "sample_epochs", "speed_sequences"):
        check_value(f"--{name}", getattr(a, name), int, Rule(at_least=1))
    torch.set_num_threads(1)  # operations are too small for more
    rows = [row for part in a.parts for row in parts[part](a)]
    title = (
        "Learning one layer of linear attention, each seed: squared errors on fresh sequences, relative to the "
        f"targets; and distances of coefficients to the teacher's, whose norm is {KEYS}. Adam in float32, batches of "
        f"{a.batch} sequences; one layer at the better of two learning rates, by the median; others at the rate that "
        "was better in short trials:"
    )
    tables = (table_of_heads(rows), table_of_certificate(rows), table_of_speed(rows))
    tables = [table for table in tables if len(table) > 1]
    measure.write(a.out, "polytime-cpu", title, measure.machine("cpu"), tables, rows)
    for part in [part for part in a.parts if part != "speed"]:
        picture = a.out / f"polytime-{part}-cpu.png"
        {"heads": draw_heads, "certificate": draw_certificate}[part](rows, picture)
        print(f"picture  {picture}")


# Models


def features(x: Tensor) -> Tensor:
    """The features of polytime.py for causal attention, (..., n, ψ), of tokens (..., n, d)."""
    rows, columns = torch.triu_indices(x.shape[-1], x.shape[-1])
    S = (x[..., rows] * x[..., columns]).cumsum(-2)
    return (S[..., :, None] * x[..., None, :]).flatten(-2)


class Layers(nn.Module):
    """Layers of linear attention with residual connections, for each seed and number of heads, trained side by side.

    The heads are averaged and the scores divided by √d. Heads beyond a model's own are 0, get no gradient and stay 0.
    Outputs and gradients are those of attention, but computed with the coefficients of the heads, which is faster.
    """

    def __init__(self, seeds: int, heads: Sequence[int], d: int, e: int, layers: int = 1):
        super().__init__()
        own = (torch.arange(max(heads)) < torch.tensor(heads)[:, None])[:, :, None, None]
        shape, sizes = (seeds, len(heads), max(heads)), [d] * (layers - 1) + [e]
        self.values = nn.ParameterList(torch.randn(*shape, size, d) * d**-0.5 * own for size in sizes)
        self.keyqueries = nn.ParameterList(torch.randn(*shape, d, d) * d**-0.5 * own for _ in sizes)
        self.scale = 1 / (torch.tensor(heads, dtype=torch.float64) * d**0.5)

    def coefficients(self, layer: int = 0) -> Tensor:
        """(seeds, models, e, ψ)"""
        p = coefficients(self.values[layer], self.keyqueries[layer])
        return p.flatten(3) * self.scale[:, None, None].to(p.dtype)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        """Return outputs (seeds, models, b, n, e) for tokens, (seeds, b, n, d), and their features."""
        y = torch.einsum("sbnf,skef->skbne", first, self.coefficients())
        x = x[:, None]
        for layer in range(1, len(self.values)):
            x = x + y
            y = torch.einsum("skbnf,skef->skbne", features(x), self.coefficients(layer))
        return y


class Softmax(nn.Module):
    """A causal softmax transformer of one layer and 4 heads for each seed, with LayerNorm, MLP and positions."""

    def __init__(self, seeds: int, d: int, e: int, width: int = 32):
        super().__init__()
        self.embed = nn.ModuleList(nn.Linear(d, width) for _ in range(seeds))
        self.positions = nn.ParameterList(0.02 * torch.randn(TOKENS, width) for _ in range(seeds))
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(seeds))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(seeds))
        self.outputs = nn.ModuleList(nn.Linear(width, e) for _ in range(seeds))

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[2])
        modules = zip(x, self.embed, self.positions, self.blocks, self.norms, self.outputs)
        return torch.stack([
            output(norm(block(embed(tokens) + positions, mask, is_causal=True)))
            for tokens, embed, positions, block, norm, output in modules
        ])[:, None]  # fmt: skip


def train(
    models: dict[float, nn.Module], loss: Callable[[nn.Module, Tensor], Tensor], count: int, batch: int, epochs: int,
    name: str,
) -> float:  # fmt: skip
    """Train models, {learning rate: model}, by Adam with a tenth of warm-up and a cosine to 0; return the seconds."""
    optimizer = torch.optim.Adam([{"params": [*model.parameters()], "lr": rate} for rate, model in models.items()])
    steps = epochs * max(1, count // batch)
    warm_up = max(1, steps // 10)

    def factor(step: int) -> float:
        after = (step - warm_up) / max(1, steps - warm_up)
        return (step + 1) / warm_up if step < warm_up else 0.5 * (1 + math.cos(math.pi * after))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    begin = time.perf_counter()
    with cli.progress(total=steps, desc=name, unit="step") as bar:
        for _ in range(epochs):
            for rows in torch.randperm(count)[: max(1, count // batch) * batch].split(batch):
                optimizer.zero_grad()
                sum(loss(model, rows) for model in models.values()).backward()
                optimizer.step()
                schedule.step()
                bar.update()
    return time.perf_counter() - begin


# Does Adam find the global optimum, and do more heads help?


def run_heads(a: argparse.Namespace) -> list[dict]:
    rows = []
    for d in a.dimensions:
        teachers = [teacher(d, seed) for seed in range(a.seeds)]
        test = [sequences(p, TEST, seed + 1000) for seed, p in enumerate(teachers)]
        for count in a.sequences:
            data = [sequences(p, count, seed) for seed, p in enumerate(teachers)]
            begin = time.perf_counter()
            fitted = [fit(z, y, causal=True) for z, y in data]
            seconds = time.perf_counter() - begin
            errors = [relative_error(layer(z), y) for layer, (z, y) in zip(fitted, test)]
            rows.append(row_of(d, count, GLOBAL, errors, seconds=seconds))
            jobs = [(1, a.heads, RATES, a.epochs)]
            if count == min(a.sequences):
                jobs += [(1, a.heads, RATES, a.deep_epochs)]
                jobs += [(layers, DEEP_HEADS, DEEP_RATES, a.deep_epochs) for layers in a.layers]
                jobs += [(0, [4], SOFTMAX_RATES, a.deep_epochs)]  # the softmax transformer
            for job in jobs:
                rows += train_on(data, test, a.batch, *job)
    return rows


def train_on(
    data: list, test: list, batch: int, layers: int, heads: Sequence[int], rates: Sequence[float], epochs: int
) -> list[dict]:
    """Train models of one depth, for all seeds and numbers of heads, and return the errors at the better rate."""
    x, y = (torch.stack(parts) for parts in zip(*data))  # (seeds, count, n, d or 1)
    first, models = features(x), {}
    seeds, count, _, d = x.shape
    for rate in rates:
        torch.manual_seed(0)
        models[rate] = Layers(seeds, heads, d, 1, layers) if layers else Softmax(seeds, d, 1)
    if layers == 1:  # the error is quadratic in the coefficients: of all tokens only their second moments are needed
        moments = first.mT @ first, (first.mT @ y).squeeze(3), y.square().sum((2, 3))
        gram, cross, square = (x.float() for x in moments)

        def loss(model: Layers, rows: Tensor) -> Tensor:
            p = model.coefficients().squeeze(2)  # (seeds, models, ψ)
            linear = torch.einsum("skf,sf->sk", p, cross[:, rows].sum(1))
            quadratic = ((p @ gram[:, rows].sum(1)) * p).sum(2)
            return (quadratic - 2 * linear + square[:, rows].sum(1, keepdim=True)).sum() / (len(rows) * TOKENS)
    else:
        small, target, given = x.float(), y.float(), first.float()

        def loss(model: nn.Module, rows: Tensor) -> Tensor:
            outputs = model(small[:, rows], given[:, rows])
            return (outputs - target[:, None, rows]).square().mean((2, 3, 4)).sum()

    name = plural(layers, "layer") if layers else SOFTMAX
    seconds = train(models, loss, count, batch, epochs, f"d={d}, {count:,} sequences, {name}")
    z, target = (torch.stack(parts) for parts in zip(*test))
    first, errors = features(z), {}
    with torch.no_grad():
        for rate, model in models.items():
            outputs = model.double()(z, first)
            errors[rate] = [[relative_error(y, t) for y in of_seed] for of_seed, t in zip(outputs, target)]
    rows = []
    for number, count_of_heads in enumerate(heads):
        of_rate = {rate: [of_seed[number] for of_seed in found] for rate, found in errors.items()}
        rate = min(of_rate, key=lambda rate: median(of_rate[rate]))
        more = {"heads": count_of_heads, "rate": rate, "epochs": epochs, "seconds": seconds}
        rows.append(row_of(d, count, name, of_rate[rate], **more))
    return rows


def row_of(d: int, sequences: int, model: str, errors: list[float], **more: float) -> dict:
    return {"part": "heads", "d": d, "sequences": sequences, "model": model, "errors": errors, **more}


def teacher(d: int, seed: int) -> Tensor:
    """The coefficients of one head with one output, (1, pairs, d); entries from N(0, 1/d)."""
    generator = torch.Generator().manual_seed(seed)
    values, keyqueries = (
        torch.randn(1, size, d, generator=generator, dtype=torch.float64) * d**-0.5 for size in (1, d)
    )
    return coefficients(values, keyqueries)


def sequences(p: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens from N(0, 1/n), (count, n, d), and the teacher's outputs, (count, n, 1)."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(count, TOKENS, p.shape[-1], generator=generator, dtype=torch.float64) * TOKENS**-0.5
    return z, features(z) @ p.flatten(1).T


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count > 1)}"


def relative_error(y: Tensor, target: Tensor) -> float:
    error = float((y - target).square().sum() / target.square().sum())
    return error if math.isfinite(error) else math.inf


# Does the certificate tell what is learned?


def run_certificate(a: argparse.Namespace) -> list[dict]:
    d, numbers = 2 * KEYS, [1, 2, 4, 8]
    part = torch.arange(d) < KEYS
    values, keyqueries = torch.diag((~part).double())[None], torch.diag(part.double())[None]
    wanted = coefficients(values, keyqueries)
    rows = []
    for seed in range(a.seeds):
        generator, found, data = torch.Generator().manual_seed(seed), [], []
        for share in SHARES:
            z = memories(a.samples, share, generator)
            last = features_of_last(z)
            y = last @ wanted.flatten(1).T
            moments = Moments("last").add(z, y)
            proof = moments.certificate()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                p = moments.fit().coefficients()
            start = torch.randn(p.shape, generator=generator, dtype=torch.float64) / d
            free = proof.blind.flatten(1)
            near = p + (start.flatten(1) @ free.T @ free).view_as(p)
            facts = ["certificate", share, seed, proof.rank, proof.size, proof.smallest]
            found.append(dict(zip(FACTS, facts)))
            found[-1] |= {"least norm": distance(p, wanted), "nearest to a start": distance(near, wanted)}
            data.append((last.float(), y.float()))
        first, y = (torch.stack(parts) for parts in zip(*data))  # (shares, samples, …)
        torch.manual_seed(seed)
        model = Recall(len(SHARES), numbers, d)

        def loss(model: nn.Module, rows: Tensor, first=first, y=y) -> Tensor:
            p = model()  # (shares, models, d, ψ)
            return (torch.einsum("sbf,skef->skbe", first[:, rows], p) - y[:, None, rows]).square().mean((2, 3)).sum()

        train({0.01: model}, loss, a.samples, min(256, a.samples), a.sample_epochs, f"associative memory, seed {seed}")
        with torch.no_grad():
            learned = model().double().unflatten(-1, (-1, d))
        for row, of_share in zip(found, learned):
            row["trained coefficients"] = distance(of_share[-1], wanted)
            row |= {plural(heads, "head"): distance(p, wanted) for heads, p in zip(numbers, of_share)}
        rows += found
    return rows


class Recall(nn.Module):
    """For each share of orthonormal samples, layers with several numbers of heads and, last, free coefficients."""

    def __init__(self, shares: int, heads: list[int], d: int):
        super().__init__()
        self.layers = Layers(shares, heads, d, d)
        self.free = nn.Parameter(torch.randn(shares, 1, d, d * d * (d + 1) // 2) / d)

    def forward(self) -> Tensor:
        return torch.cat([self.layers.coefficients(), self.free], 1)


def memories(count: int, share: float, generator: torch.Generator) -> Tensor:
    """Tokens (count, 5, 8): four keys, each with its value, and last a query, which is one of the keys, with a random
    value. Keys and values are Gaussian, or in a share of the samples the columns of random orthogonal matrices."""
    keys, values = (torch.randn(count, KEYS, KEYS, generator=generator, dtype=torch.float64) for _ in range(2))
    orthonormal = torch.arange(count) < round(share * count)
    for x in (keys, values):
        x[orthonormal] = torch.linalg.qr(x[orthonormal]).Q
    query = keys[torch.arange(count), torch.randint(KEYS, (count,), generator=generator)]
    other = torch.randn(count, KEYS, generator=generator, dtype=torch.float64)
    return torch.cat([torch.cat([keys, values], 2), torch.cat([query, other], 1)[:, None]], 1)


def features_of_last(z: Tensor) -> Tensor:
    return features(z)[:, -1]


def distance(p: Tensor, wanted: Tensor) -> float:
    return float((p - wanted).norm())


# How long does a fit take?


def run_speed(a: argparse.Namespace) -> list[dict]:
    rows = []
    for d in a.speed_dimensions:
        z = torch.randn(a.speed_sequences, 8, d, dtype=torch.float64)
        begin = time.perf_counter()
        moments = Moments().add(z, z)
        summed = time.perf_counter()
        size = moments.fit().fitted.size
        seconds = {"sums": summed - begin, "fit": time.perf_counter() - summed}
        rows.append({"part": "speed", "d": d, "unknowns": size, "sequences": len(z), **seconds})
    return rows


# Tables and pictures


def table_of_heads(rows: list[dict]) -> list[list[str]]:
    rows = [row for row in rows if row["part"] == "heads"]
    seeds = range(max((len(row["errors"]) for row in rows), default=0))
    header = ["d", "sequences", "model", "heads", "epochs", "learning rate", *(f"error, seed {seed}" for seed in seeds)]
    lines = [[*header, "time, s"]]
    for row in rows:
        options = [str(row.get(name, "-")) for name in ("heads", "epochs", "rate")]
        errors = [f"{error:.1e}" for error in row["errors"]]
        lines.append(
            [str(row["d"]), f"{row['sequences']:,}", row["model"], *options, *errors, f"{row['seconds']:,.1f}"]
        )
    return lines


def table_of_certificate(rows: list[dict]) -> list[list[str]]:
    rows = [row for row in rows if row["part"] == "certificate"]
    if not rows:
        return []
    names = [name for name in rows[0] if name not in FACTS]
    lines = [["orthonormal", "seed", "rank", "λ_min", *names]]
    for row in sorted(rows, key=lambda row: (row["share"], row["seed"])):
        facts = [f"{row['share']:.1%}", str(row["seed"]), f"{row['rank']} of {row['size']}", f"{row['smallest']:.2g}"]
        lines.append([*facts, *(f"{row[name]:.1e}" for name in names)])
    return lines


def table_of_speed(rows: list[dict]) -> list[list[str]]:
    rows = [row for row in rows if row["part"] == "speed"]
    lines = [["d", "unknowns per output", "sequences", "sums, s", "fit, s"]]
    for row in rows:
        sizes = [f"{row[name]:,}" for name in ("d", "unknowns", "sequences")]
        lines.append([*sizes, *(f"{row[name]:.2f}" for name in ("sums", "fit"))])
    return lines


def draw_heads(rows: list[dict], picture: Path) -> None:
    """Draw a plot per d: error against heads, a line per depth and number of sequences, a dot per seed."""
    rows = [row for row in rows if row["part"] == "heads"]
    dimensions = list(dict.fromkeys(row["d"] for row in rows))
    title = (
        "One head of linear attention, learned: error on fresh sequences (after figure 1 of arXiv:2410.10101)\n"
        "Ours: the fit is least squares and an SVD; fewer epochs; the softmax transformer has one layer of width 32."
    )
    figure, axes = plots.subplots(columns=len(dimensions), title=title, height=4.8)
    for axis, d in zip(axes[0], dimensions):
        lines: dict[str, list[dict]] = {}
        for row in (row for row in rows if row["d"] == d):
            trained = f", {row['sequences']:,} sequences, {row['epochs']} epochs" if "epochs" in row else ""
            lines.setdefault(row["model"] + trained, []).append(row)
        for shade, (label, of_line) in zip(["black", *plots.OTHERS] * 2, lines.items()):
            if "rate" in of_line[0] and of_line[0]["model"] != SOFTMAX:
                heads = [row["heads"] for row in of_line]
                axis.plot(heads, [median(row["errors"]) for row in of_line], "-", color=shade, label=label)
                for row in of_line:
                    axis.plot([row["heads"]] * len(row["errors"]), row["errors"], ".", color=shade)
            else:
                style = "--" if of_line[0]["model"] == GLOBAL else ":"
                axis.axhline(median(of_line[0]["errors"]), color=shade, ls=style, label=label)
        plots.label_axes(axis, f"tokens of {d} dimensions", "heads", "squared error / squared targets")
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(list(dict.fromkeys(row["heads"] for row in rows if "heads" in row)))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.xaxis.set_minor_formatter("")
        axis.yaxis.set_major_formatter("{x:.0e}")
    plots.save(figure, picture)


def draw_certificate(rows: list[dict], picture: Path) -> None:
    """Draw the distance to the teacher against λ_min: least squares on the left, trained heads on the right."""
    rows = [row for row in rows if row["part"] == "certificate"]
    names = [name for name in rows[0] if name not in FACTS]
    sides = {
        "least squares": [name for name in names if "head" not in name],
        "heads, trained by Adam": [name for name in names if "head" in name],
    }
    title = (
        "Associative memory: distance of the learned layer to the teacher, ‖p − p*‖ (after figure 2 of arXiv:2410.10101)\n"
        "The paper trains coefficients and heads by Adam, as here; the two exact minimizers are ours."
    )
    figure, axes = plots.subplots(columns=2, title=title)
    for axis, (side, shown), shades in zip(axes[0], sides.items(), (plots.OTHERS, plots.OTHERS[3:])):
        for name, shade in zip(shown, shades):
            points = [row["smallest"] for row in rows], [row[name] for row in rows]
            size = 8 if name == "least norm" else 4  # seen as a rim where the next coincides
            axis.plot(*points, "o", ms=size, color=shade, label=name)
        plots.label_axes(axis, side, "λ_min of the certificate; 0: not identifiable", "‖p − p*‖")
        axis.set_xscale("symlog", linthresh=1e-4)
        axis.set_yscale("log")
        axis.set_xticks([0, 1e-3, 1e-2, 0.1, 1])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:.0e}")
        axis.yaxis.set_minor_formatter("")
    plots.save(figure, picture)


if __name__ == "__main__":
    cli.run(main)
