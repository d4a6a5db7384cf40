"""Pictures: one colour per mixer, labelled axes, a legend outside the plots, files written atomically."""

import json

import pytest

from src import plots
from src.training.task import Curve


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, in order."""
    saved = []
    save = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: (saved.append(figure), save(figure, path)))
    return saved


def write_metrics(folder, name="lion-s-tiny"):
    lines = [
        {"step": 0, "samples": 0, "eval": {"eval/Loss": 9.0, "eval/Accuracy": 0.0, "eval/Floor": 0.06}},
        {"step": 10, "samples": 320, "loss": 8.0, "accuracy": 0.05},
        {"step": 20, "samples": 640, "loss": 7.0, "accuracy": 0.1},
        {"step": 20, "samples": 640, "eval": {"eval/Loss": 7.0, "eval/Accuracy": 0.1, "eval/Floor": 0.06}},
    ]
    (folder / name).mkdir()
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return name, folder / name


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    "name, mixer",
    [
        ("lion-s", "lion-s"),
        ("lion-s-base-8k", "lion-s"),
        ("LION-D", "lion-d"),
        ("lion-lit-tiny", "lion-lit"),
        ("softmax", "softmax"),
        ("bert-tiny", "softmax"),
        ("Hugging Face BERT", "hugging face bert"),
        ("Hugging Face ModernBERT", "modernbert"),
    ],
)
def test_a_name_has_the_color_of_its_mixer(name, mixer):
    assert plots.color(name) == plots.COLORS[mixer]


def test_colors_of_one_picture_differ():
    names = ["lion-s-tiny", "lion-s-tiny without pretraining", "lion-small", "pretrained", "bert-base"]
    chosen = plots.colors(names)
    assert len(set(chosen)) == len(names)
    assert (chosen[0], chosen[-1]) == (plots.COLORS["lion-s"], plots.COLORS["softmax"])


def test_curves_have_units_a_title_and_a_legend_outside_the_plots(tmp_path, figures):
    runs = [write_metrics(tmp_path, name) for name in ("lion-s-tiny", "bert-tiny")]
    panels = [
        Curve("loss", "loss", "eval/Loss", unit="nats per token"),
        Curve("accuracy", "masked accuracy", "eval/Accuracy", percent=True),
        Curve("most_frequent_token", "most frequent token", "eval/Floor", percent=True, baseline=True),
    ]
    plots.curves(runs, panels, tmp_path / "curves.png", "corpus: pretraining")
    (figure,) = figures
    assert figure.get_suptitle() == "corpus: pretraining"
    assert [axis.get_ylabel() for axis in figure.axes] == ["nats per token", "%"]
    assert {axis.get_xlabel() for axis in figure.axes} == {"samples seen"}
    assert labels(figure) == ["lion-s-tiny", "bert-tiny", "most frequent token"]
    assert not any(axis.get_legend() for axis in figure.axes)
    accuracy = next(line for line in figure.axes[1].lines if line.get_label() == "lion-s-tiny")
    assert list(accuracy.get_ydata()) == [0, 10] and accuracy.get_color() == plots.COLORS["lion-s"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_of_a_run_without_an_evaluation_or_a_metric(tmp_path):
    (tmp_path / "empty").mkdir()
    panels = [Curve("other", "other", "eval/Other"), Curve("floor", "floor", "eval/Other", baseline=True)]
    plots.curves([("empty", tmp_path / "empty"), write_metrics(tmp_path)], panels, tmp_path / "c.png", "")
    assert (tmp_path / "c.png").exists()


def test_bars_are_means_with_a_dot_per_seed_and_a_baseline(tmp_path, figures):
    runs = [("lion-s", {"RTE\naccuracy": [60, 64], "costs $1 of $2": [50]}), ("bert", {"RTE\naccuracy": [70]})]
    plots.bars(runs, {"RTE\naccuracy": 53, "costs $1 of $2": 50}, tmp_path / "bars.png", "GLUE", "%")
    (axis,) = figures[0].axes
    assert [bar.get_height() for bar in axis.patches] == [62, 50, 70]
    assert labels(figures[0]) == ["majority class", "lion-s", "bert"]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["RTE\naccuracy", "costs $1 of $2"]


@pytest.mark.parametrize("heights, scale", [([0.0, float("nan")], "linear"), ([0.0, 3.0], "log"), ([], "linear")])
def test_a_plot_without_a_positive_value_has_no_logarithmic_axis(tmp_path, heights, scale):
    figure, axes = plots.subplots()
    axes[0, 0].plot(range(1, len(heights) + 1), heights, label="memory")
    plots.label_axes(axes[0, 0], "peak memory", "tokens", "MiB", log=True)
    assert axes[0, 0].get_yscale() == scale
    plots.save(figure, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "heights, shown", [([0.4, 3], ["0.5", "1", "2"]), ([12, 70], ["20", "50"]), ([0.5, 20_000], ["1", "100", "10,000"])]
)
def test_a_logarithmic_axis_has_several_numbers_and_no_mathematical_text(heights, shown):
    figure, axes = plots.subplots()
    axes[0, 0].plot([128, 256], heights)
    plots.label_axes(axes[0, 0], "", "tokens", "ms", log=True)
    figure.canvas.draw()
    low, high = axes[0, 0].get_ylim()
    axis = axes[0, 0].yaxis
    seen = [tick.label1.get_text() for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    seen += [label.get_text() for label in axis.get_minorticklabels()]
    assert set(shown) <= set(seen) and not any("$" in text for text in seen)


def test_a_picture_is_replaced_atomically(tmp_path):
    plots.bars([("a", {"b": [1]})], {}, tmp_path / "a.svg", "", "%")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    with pytest.raises(OSError):
        plots.bars([("a", {"b": [1]})], {}, tmp_path / "none" / "a.png", "", "%")
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_names_in_other_scripts_are_drawn_by_an_installed_font_or_as_boxes(tmp_path, monkeypatch, recwarn):
    import matplotlib

    monkeypatch.setattr(plots, "FALLBACKS", ("DejaVu Serif", "no such font"))
    figure, _ = plots.subplots(title="猫 ネコ 고양이")
    assert matplotlib.rcParams["font.family"] == ["sans-serif", "DejaVu Serif"]
    plots.save(figure, tmp_path / "it.png")
    assert not [each for each in recwarn if "Glyph" in str(each.message)]
