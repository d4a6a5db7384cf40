"""Pictures of training curves, from the metrics of jobs."""

import json

from src.jobs import curves


def test_curves_have_a_plot_per_task_a_line_per_run_and_thin_lines_per_seed(tmp_path, monkeypatch):
    figures, save = [], curves.plots.save
    monkeypatch.setattr(curves.plots, "save", lambda figure, path: (figures.append(figure.axes), save(figure, path)))
    rows = []
    for task in ("one", "two"):
        for seed in (1, 2):
            (job := tmp_path / "jobs" / f"{task}-{seed}").mkdir(parents=True)
            evaluations = [{"samples": n, "eval": {"a/accuracy": seed / 4, "b/accuracy": n / 40}} for n in (10, 20)]
            lines = [{"samples": 5, "loss": 1.0}, *evaluations[: 3 - seed]]  # the second stopped early
            (job / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        rows.append({"title": task.title(), "folders": {"1": f"{task}-1", "2": f"{task}-2"}, "majority": 0.5})
    rows.append({"title": "Old", "folders": {"1": "old-1"}, "majority": 0.5})  # without metrics
    assert curves.draw({"a": (tmp_path, rows), "b": (tmp_path, rows[:1])}, tmp_path / "curves.png")
    ((one, two),) = figures
    assert [axis.get_title() for axis in (one, two)] == ["One", "Two"]
    first, second, average, majority = (line.get_xydata().tolist() for line in two.lines)
    assert (first, second) == ([[10, 25], [20, 37.5]], [[10, 37.5]])
    assert average == [[10, 31.25]] and majority[0][1] == 50
    assert len(one.lines) == 7 and (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_metrics_nothing_is_drawn(tmp_path):
    assert not curves.draw({"a": (tmp_path, [])}, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
