"""Pathfinder: images by the rules, and files that are the same with several workers and after interruptions."""

import json
import math
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA, ROOT, needs_reference
from PIL import Image

from src.errors import UserError
from src.lra import make, pathfinder

LEVEL = Path("curv_contour_length_14")
FEW = ("--size", 32, "--images", 12)


def run_make(out: Path, *options: object) -> Path:
    make.main(["pathfinder", "--out", str(out), *map(str, options)])
    return next(out.glob("pathfinder*"))


def contents(folder: Path) -> dict[str, bytes]:
    names = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return run_make(tmp_path_factory.mktemp("pathfinder"), *FEW)


@pytest.fixture(scope="module", params=[32, 128])
def drawings(request) -> tuple[int, list[pathfinder.Drawing]]:
    size = request.param
    return size, [pathfinder.draw(size, 7, index) for index in range(40 if size == 32 else 6)]


def center(image: np.ndarray, y: int, x: int, radius: int) -> np.ndarray:
    """The pixels around a disc's middle."""
    return image[max(y - radius, 0) : y + radius + 1, max(x - radius, 0) : x + radius + 1]


def test_the_label_says_whether_one_contour_has_a_disc_at_both_ends(drawings):
    _, drawn = drawings
    for drawing in drawn:
        origins = [(contour[0].y, contour[0].x) for contour in drawing.contours[:2]]
        tips = [(contour[-1].y, contour[-1].x) for contour in drawing.contours[:2]]
        first, second = drawing.discs
        assert tips.index(second) == (origins.index(first) if drawing.label else 1 - origins.index(first))
        assert len({*origins, *tips}) == 4
    assert {drawing.label for drawing in drawn} == {0, 1}


def test_contours_are_chains_of_paddles(drawings):
    size, drawn = drawings
    rules = pathfinder.RULES[size]
    for drawing in drawn:
        assert [len(contour) for contour in drawing.contours[:2]] == [14, 14]
        assert {len(contour) for contour in drawing.contours[2:]} <= {4}
        assert len(drawing.contours) <= 2 + rules.distractors
        margin = max(rules.margins)
        for contour in drawing.contours:
            for (y, x, _), (next_y, next_x, _) in pairwise(contour[1:]):  # ends are a paddle and a gap apart
                assert math.dist((y, x), (next_y, next_x)) <= rules.length + 2 * margin + 2.5
        (y, x, _), (other_y, other_x, _) = (contour[0] for contour in drawing.contours[:2])
        assert abs(math.dist((y, x), (other_y, other_x)) - rules.seed_distance) < 1
        ends = [(paddle.y, paddle.x) for contour in drawing.contours for paddle in contour[1:]]
        assert all(0 < y < size - 1 and 0 < x < size - 1 for y, x in ends)


def test_discs_and_paddles_are_where_the_drawing_says(drawings):
    size, drawn = drawings
    rules = pathfinder.RULES[size]
    for drawing in drawn:
        image = drawing.image
        assert image.shape == (size, size) and image.dtype == np.uint8 and image.max() == 255
        for y, x in drawing.discs:  # a paddle is too thin for so many bright pixels in a square
            assert center(image, y, x, math.ceil(rules.disc) - 1).mean() > 110
            assert image[y, x] > 200
        unlit = image.copy()
        for contour in drawing.contours:
            for paddle in contour:
                center(unlit, paddle.y, paddle.x, rules.length + 2)[:] = 0
        for y, x in drawing.discs:
            center(unlit, y, x, math.ceil(rules.disc) + 3)[:] = 0
        assert unlit.max() < 10  # the rest is what antialiasing leaves


def test_images_depend_on_seed_and_number_alone():
    one = pathfinder.draw(32, 5, 17)
    assert np.array_equal(one.image, pathfinder.draw(32, 5, 17).image)
    assert not np.array_equal(one.image, pathfinder.draw(32, 5, 18).image)
    assert not np.array_equal(one.image, pathfinder.draw(32, 6, 17).image)


def test_labels_are_even():
    labels = [pathfinder.describe(pathfinder.Random(f"0 {index}"), pathfinder.RULES[128]) for index in range(4000)]
    for column, values in enumerate(((0, 1), (2, 3), (0, 1))):
        shares = [sum(label[column] == value for label in labels) / 4000 for value in values]
        assert sum(shares) == 1 and abs(shares[0] - 0.5) < 0.03


def test_files_are_laid_out_as_in_the_release(folder):
    lines = (folder / LEVEL / "metadata" / "0.npy").read_text().splitlines()
    assert len(lines) == 12
    for number, line in enumerate(lines):
        drawing = pathfinder.draw(32, 0, number)
        assert line == f"imgs/0 sample_{number}.png {number} {drawing.label} 1.0 14 4 2 0.5 1 1"
        image = Image.open(folder / LEVEL / "imgs" / "0" / f"sample_{number}.png")
        assert image.mode == "L" and np.array_equal(np.asarray(image), drawing.image)
    record = json.loads((folder / "generated.json").read_text())
    assert record["options"] == {"data": "pathfinder", "size": 32, "images": 12, "seed": 0}
    assert record["label 0"] + record["label 1"] == 12
    assert Image.open(folder / "examples.png").size[0] > 1000


def test_a_finished_command_does_nothing(folder, caplog):
    before = contents(folder)
    with caplog.at_level("INFO", logger="lion"):
        run_make(folder.parent, *FEW, "--workers", 3)
    assert "is finished: nothing to do" in caplog.text
    assert contents(folder) == before
    with pytest.raises(UserError, match=r"data of other options \(--images 12, --seed 0\)"):
        run_make(folder.parent, "--size", 32, "--images", 13, "--seed", 1)


def test_a_changed_image_is_noticed(folder):
    before = contents(folder)
    (folder / LEVEL / "imgs" / "0" / "sample_3.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"has changed since it was generated .*add --overwrite"):
        run_make(folder.parent, *FEW)
    run_make(folder.parent, *FEW, "--overwrite")
    assert contents(folder) == before


def test_images_are_kept_when_resuming(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(pathfinder, "PER_FOLDER", 4)
    monkeypatch.setattr(pathfinder, "CHUNK", 2)
    drawn, draw = [], pathfinder.draw

    def stop(size, seed, index):
        drawn.append(index)
        if index == 7 and len(drawn) < 9:
            raise KeyboardInterrupt
        return draw(size, seed, index)

    monkeypatch.setattr(pathfinder, "draw", stop)
    with pytest.raises(KeyboardInterrupt):
        run_make(tmp_path, *FEW)
    found = tmp_path / "pathfinder32"
    assert (found / LEVEL / "metadata" / "0.npy").exists()
    assert not (found / LEVEL / "metadata" / "1.npy").exists() and not (found / "generated.json").exists()
    run_make(tmp_path, *FEW)
    assert drawn == [*range(8), *range(7, 12)]
    for index in range(12):
        name = LEVEL / "imgs" / str(index // 4) / f"sample_{index % 4}.png"
        first = LEVEL / "imgs" / "0" / f"sample_{index}.png"
        assert (found / name).read_bytes() == (folder / first).read_bytes()
    lines = (found / LEVEL / "metadata" / "1.npy").read_text().splitlines()
    assert [line.split()[:3] for line in lines] == [["imgs/1", f"sample_{i}.png", str(i)] for i in range(4)]


@pytest.mark.slow
def test_a_killed_command_resumes_with_workers_to_the_same_bytes(tmp_path):
    options = ("--size", 32, "--images", 130)
    code = "import sys\nif __name__ == '__main__':\n    from src.lra.make import main; main(sys.argv[1:])"
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}\n")

    def start(out: str, workers: int) -> subprocess.Popen:
        command = ["pathfinder", "--out", str(tmp_path / out), *map(str, options), "--workers", str(workers)]
        return subprocess.Popen([sys.executable, str(program), *command], stderr=subprocess.DEVNULL)

    process = start("killed", 1)
    images = tmp_path / "killed" / "pathfinder32" / LEVEL / "imgs" / "0"
    deadline = time.monotonic() + 60
    while not (images.is_dir() and len(list(images.iterdir())) > 30) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (images.parents[1] / "metadata" / "0.npy").exists()
    assert start("killed", 2).wait(timeout=120) == 0
    assert contents(run_make(tmp_path / "whole", *options)) == contents(images.parents[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--size", 32, "--images", 0), "--images 0 must be at least 1"),
        ((*FEW, "--workers", 0), "--workers 0 must be at least 1"),
        ((*FEW, "--seed", -1), "--seed -1 must be at least 0"),
    ],
)
def test_impossible_options_are_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        run_make(tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_targets_that_end_in_the_same_pixel_are_drawn_again(monkeypatch):
    def end_together(self):
        self.paddles.append(pathfinder.Paddle(20, 20, 0))
        return True

    canvas = pathfinder.Canvas(pathfinder.tables(32, 1), pathfinder.Random(0))
    monkeypatch.setattr(pathfinder.Contour, "extend", end_together)
    assert pathfinder.draw_targets(canvas, pathfinder.RULES[32]) is None


@needs_reference
def test_images_resemble_those_of_the_public_program(drawings):
    size, drawn = drawings
    paths = sorted((DATA / "lra" / f"pathfinder{size}" / LEVEL / "imgs" / "0").glob("*.png"))
    public = np.stack([np.asarray(Image.open(path)) for path in paths])
    ours = np.stack([drawing.image for drawing in drawn])
    for least in (1, 64, 128):
        expected, found = ((images >= least).sum((1, 2)).mean() for images in (public, ours))
        assert abs(found / expected - 1) < 0.12, least
    assert abs(ours.mean() / public.mean() - 1) < 0.1
    if size == 128:  # discs are white, paddles are not: 0.9 of it
        assert all(12 <= (image == 255).sum() < 16 for image in [*public, *ours])
    line = (paths[0].parents[2] / "metadata" / "0.npy").read_text().splitlines()[0].split()
    rules = pathfinder.RULES[size]
    assert line[4:9] == [str(rules.continuity), "14", "4", str(rules.length), str(rules.thickness)]
