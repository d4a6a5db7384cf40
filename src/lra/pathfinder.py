"""Pathfinder images: dashed contours and two discs. The label is 1 if the discs are the two ends of one contour.

Rules of the public generator (Linsley et al. 2018, github.com/drewlinsley/pathfinder) with the settings of Long Range
Arena's hard level: two target contours of 14 paddles that begin near each other, and shorter distractors. A disc
is at the beginning of one target; the other disc at its end or, with probability ½, at the other target's end. 32
pixels a side are the task Pathfinder, 128 are Path-X.
"""

import functools
import io
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from src.cli import log, progress
from src.data.workers import in_order
from src.errors import UserError
from src.files import sha256, write_atomically

LEVEL = "curv_contour_length_14"
EXAMPLES = "examples.png"
TARGET, DISTRACTOR = 14, 4  # paddles of a contour
PER_FOLDER, CHUNK = 1000, 50  # images; chunks, one worker's work, divide a subfolder
FINER = 2  # paddles and discs are drawn at twice the resolution, for antialiasing
PADDLE_TRIALS, CONTOUR_TRIALS = 3, 5
TOUCHING = 459  # two masks (0 … 255) touch where their sum is at least 1.8 times 255
OCCUPIED = 76  # a mask covers a pixel above 0.3 times 255
PADDING = 1  # pixels at the border that paddles keep off


@dataclass(frozen=True)
class Rules:
    margins: tuple[int, ...]  # between paddles, in pixels; one is drawn for each image
    length: int  # of a paddle, in pixels
    thickness: float
    disc: float  # radius
    continuity: float
    seed_distance: int  # between the beginnings of the two targets
    distractors: int
    contrasts: tuple[float, float]  # of targets and of distractors


RULES = {
    32: Rules((1,), 2, 0.5, 1.5, 1.0, 7, 5, (1.5, 2.0)),
    128: Rules((2, 3), 5, 1.5, 3, 1.8, 20, 8, (0.9, 0.9)),
}


class Paddle(NamedTuple):
    """A paddle's end from which it is drawn (of a contour's first, the beginning; else the end) and its heading."""

    y: int
    x: int
    heading: int


class Drawing(NamedTuple):
    image: np.ndarray  # (size, size) uint8
    label: int
    discs: list[tuple[int, int]]  # y, x of both
    contours: list[list[Paddle]]  # the two targets, then the distractors


@dataclass(frozen=True)
class Tables:
    """What the paddles of one size and margin have in common. Headings 0 … 359 are those of first paddles, in degrees
    from -180; the others those of later paddles, each toward one pixel of the circle on which they may end.

    Coordinates are those of the image plus `edge`, so that no paddle leaves an array."""

    size: int
    edge: int
    reach: int  # half the side of a stamp, (side, side), with the end from which a paddle is drawn in the middle
    lines: np.ndarray  # (headings, side, side) uint8: its gray values
    # The others are flat, for flat arrays of size + 2 · edge pixels a side: NumPy is much faster with one long row than
    # with many short ones. (headings, n) uint8
    masks: np.ndarray  # the space it takes, which is its line grown by the margin
    room: np.ndarray  # it touches other masks that are larger than this
    free: np.ndarray  # what its mask, grown by the margin again, leaves of 255: how easily other paddles end there
    core: list[np.ndarray]  # of each first heading, the pixels that must be free, (pixels, 2), from the drawn end
    advance: list[tuple[int, int]]  # of each heading: from its pivot, the circle's middle, to the next
    back: list[tuple[int, int]]  # of each first heading: from its drawn end to its pivot
    ahead: list[tuple[int, int]]  # of each first heading: from its drawn end to its other end
    circle: list[tuple[int, int]]  # where a paddle may end, from its pivot
    # Of each heading, for the pixels of the circle that may follow it: their numbers in it, their places in a flat
    # array, and how probable each is if it is free
    next: list[tuple[list[int], np.ndarray, np.ndarray]]
    empty: tuple[np.ndarray, np.ndarray]  # mask and free, both flat, of an image with no paddle
    # First headings for which the public program can find a place. It finds none for one with which a paddle could be
    # outside the image entirely: its dilation leaves -∞ there, which ends its search. At 32 pixels these are 11 of 12
    # headings, so that all contours begin alike and few distractors fit.
    usable: list[int]
    starts: list[tuple[int, np.ndarray]]  # the first heading of a target and the pixels, (n, 2), where it may begin


def shift(angle: float, length: float, origin: int = 16) -> tuple[int, int]:
    """Return the pixels (y, x) from an origin to the point at this angle and distance, whose coordinates are rounded
    up: with 0, sin(π) would count as 1."""
    y, x = origin + length * math.sin(angle), origin + length * math.cos(angle)
    return math.ceil(y) - origin, math.ceil(x) - origin


def disc(radius: int) -> np.ndarray:
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return y**2 + x**2 <= radius**2


def grow(image: np.ndarray, radius: int) -> np.ndarray:
    from scipy.ndimage import maximum_filter  # takes half a second to import, and ListOps does not need it

    return maximum_filter(image, footprint=disc(radius), mode="constant")


def shrink(image: np.ndarray, side: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS))


def flat(stamps: list[np.ndarray], width: int, filler: int) -> np.ndarray:
    """Return stamps as they are in a flat array of this many pixels a row, from their first pixel to their last."""
    side = len(stamps[0])
    rows = np.pad(np.stack(stamps), ((0, 0), (0, 0), (0, width - side)), constant_values=filler)
    return np.ascontiguousarray(rows.reshape(len(stamps), -1)[:, : side - width])


@functools.cache
def tables(size: int, margin: int) -> Tables:
    rules = RULES[size]
    length, step = rules.length, rules.length + margin
    turns = np.arange(0, 360, 360 / (2 * np.pi * step)) * np.pi / 180
    circle = np.unique(np.floor(16 + step * np.stack([np.sin(turns), np.cos(turns)], 1)).astype(int) - 16, axis=0)
    first = [degrees * np.pi / 180 for degrees in range(-180, 180)]
    later = np.arctan2(circle[:, 0], circle[:, 1]).tolist()
    headings = np.array(first + later)
    reach = length + math.ceil(rules.thickness) + margin
    side, middle = 2 * reach + 1, FINER * reach
    lines, masks = [], []
    for angle in [*first, *(angle + np.pi for angle in later)]:  # a later paddle is drawn from its end backwards
        y, x = shift(angle, FINER * length, middle)
        fine = Image.new("L", (2 * middle + 1,) * 2)
        width = round(FINER * rules.thickness)
        ImageDraw.Draw(fine).line([(middle, middle), (middle + x, middle + y)], fill=255, width=width)
        lines.append(shrink(np.asarray(fine), side))
        masks.append(shrink(grow(np.asarray(fine), FINER * margin), side))
    # The public program looks one pixel beside where it then draws a first paddle, and so do we.
    core = [np.argwhere(stamp == 255) - reach + 1 for stamp in masks[:360]]
    lines, masks = ([np.pad(stamp, margin) for stamp in stamps] for stamps in (lines, masks))
    room = [np.minimum(TOUCHING - 1 - stamp.astype(int), 255).astype(np.uint8) for stamp in masks]
    reach += margin
    edge = reach + margin + 2
    width = size + 2 * edge
    inside = np.s_[edge:-edge, edge:-edge]
    mask = np.zeros((width, width), np.uint8)
    mask[inside] = 255
    mask[edge + PADDING : -edge - PADDING, edge + PADDING : -edge - PADDING] = 0
    free = np.zeros_like(mask)  # no paddle ends outside
    free[inside] = 255 - grow(mask[inside], margin)
    turn = np.abs(headings[:, None] - np.array(later))
    turn = np.minimum(np.minimum(turn, 2 * np.pi - turn) * rules.continuity, np.pi / 2)
    weights, possible, places = np.cos(turn) ** 2, turn < np.pi / 2, circle @ (width, 1)
    back = []
    for angle in first:
        (y, x), (back_y, back_x) = shift(angle, length), shift(angle + np.pi, step)
        back.append((y + back_y, x + back_x))
    occupied = np.zeros(mask.shape, bool)
    occupied[inside] = True
    usable = [heading for heading in range(360) if len(beginnings(core[heading], occupied, edge)) == 0]
    far = edge + 2 * rules.seed_distance  # the first target begins, with all of its first paddle, in the middle
    occupied[far:-far, far:-far] = False
    starts = [(heading, beginnings(core[heading], occupied, edge)) for heading in usable]
    return Tables(
        size=size,
        edge=edge,
        reach=reach,
        lines=np.stack(lines),
        masks=flat(masks, width, 0),
        room=flat(room, width, 255),
        free=flat([255 - grow(stamp, margin) for stamp in masks], width, 255),
        core=core,
        advance=[shift(angle, length + 2 * margin) for angle in headings],
        back=back,
        ahead=[shift(angle, length) for angle in first],
        circle=list(map(tuple, circle.tolist())),
        next=[(some.nonzero()[0].tolist(), places[some], weight[some]) for some, weight in zip(possible, weights)],
        empty=(mask.ravel(), free.ravel()),
        usable=usable,
        starts=[(heading, pixels) for heading, pixels in starts if len(pixels)],
    )


def beginnings(core: np.ndarray, occupied: np.ndarray, edge: int) -> np.ndarray:
    """Return the pixels, (n, 2), where a first paddle may be drawn so that its core covers no occupied one."""
    size = len(occupied) - 2 * edge
    free = np.ones((size, size), bool)
    for y, x in core.tolist():
        free &= ~occupied[edge + y : edge + y + size, edge + x : edge + x + size]
    return np.argwhere(free) + edge


class Canvas:
    """Where paddles are and where they may not be, while contours are drawn."""

    def __init__(self, tables: Tables, random: Random):
        self.tables, self.random, self.width = tables, random, tables.size + 2 * tables.edge
        self.mask, self.free = (array.copy() for array in tables.empty)

    def around(self, paddle: Paddle) -> slice:
        """Return where a paddle's stamp is in the flat arrays."""
        reach = self.tables.reach
        start = (paddle.y - reach) * self.width + paddle.x - reach
        return slice(start, start + self.tables.masks.shape[1])

    def occupy(self, paddle: Paddle) -> None:
        around = self.around(paddle)
        mask, free = self.mask[around], self.free[around]
        np.maximum(mask, self.tables.masks[paddle.heading], out=mask)
        np.minimum(free, self.tables.free[paddle.heading], out=free)

    def touches(self, paddle: Paddle) -> bool:
        touching = self.mask[self.around(paddle)] > self.tables.room[paddle.heading]
        return touching.argmax() > 0  # faster than any(), and the first pixel, a corner, touches nothing


class Contour:
    """A contour that grows. Its last paddle is not on the canvas yet, since the next one begins close to it."""

    def __init__(self, canvas: Canvas, first: Paddle):
        y, x = canvas.tables.back[first.heading]
        self.canvas, self.paddles, self.pivot = canvas, [first], (first.y + y, first.x + x)

    def extend(self) -> bool:
        """Draw the next paddle; return whether there is room for one."""
        canvas, tables, last = self.canvas, self.canvas.tables, self.paddles[-1]
        y, x = tables.advance[last.heading]
        self.pivot = y, x = self.pivot[0] + y, self.pivot[1] + x
        pixels, places, weights = tables.next[last.heading]
        sums = (weights * canvas.free[places + (y * canvas.width + x)]).cumsum()
        total = float(sums[-1])
        if total < 255e-4:
            return False
        for _ in range(PADDLE_TRIALS):
            pixel = pixels[sums.searchsorted(canvas.random.random() * total, "right")]
            from_y, from_x = tables.circle[pixel]
            paddle = Paddle(y + from_y, x + from_x, 360 + pixel)
            if not canvas.touches(paddle):
                canvas.occupy(last)
                self.paddles.append(paddle)
                return True
        return False


def draw_targets(canvas: Canvas, rules: Rules) -> list[Contour] | None:
    """Draw the two targets alternating paddles; return None if one gets stuck or both end in one pixel."""
    tables, random = canvas.tables, canvas.random
    edge = tables.edge
    heading, places = tables.starts[int(random.random() * len(tables.starts))]
    first = Paddle(*places[int(random.random() * len(places))].tolist(), heading)
    if not inside(first, tables):
        return None
    turn = int(random.random() * 360) * math.pi / 180
    y = round(first.y - edge + rules.seed_distance * math.sin(turn)) + edge
    x = round(first.x - edge + rules.seed_distance * math.cos(turn)) + edge
    second = Paddle(y, x, int(random.random() * 360))
    if not inside(second, tables):
        return None
    contours = [Contour(canvas, first), Contour(canvas, second)]
    for _ in range(TARGET - 1):
        for contour in contours:
            if not contour.extend():
                return None
    first, second = (contour.paddles[-1] for contour in contours)
    # If both end in the same pixel, nobody can tell the label. The public program keeps these, 3 of 1,000 at 32 pixels.
    return contours if first[:2] != second[:2] else None


def inside(first: Paddle, tables: Tables) -> bool:
    """Whether the other end and the pivot of a first paddle are in the image."""
    return all(
        0 <= at + by - tables.edge < tables.size
        for offset in (tables.ahead[first.heading], tables.back[first.heading])
        for at, by in zip(first, offset)
    )


def draw_distractors(canvas: Canvas, rules: Rules) -> list[Contour]:
    """Draw as many of the rules' distractors as fit."""
    found = []
    for _ in range(rules.distractors):
        for _ in range(CONTOUR_TRIALS):
            before = canvas.mask.copy(), canvas.free.copy()
            contour = draw_distractor(canvas)
            if contour is not None:
                found.append(contour)
                break
            canvas.mask, canvas.free = before
    return found


def draw_distractor(canvas: Canvas) -> Contour | None:
    for _ in range(PADDLE_TRIALS):
        heading = int(canvas.random.random() * 360)
        if heading not in canvas.tables.usable:
            return None
        occupied = canvas.mask.reshape(canvas.width, -1) > OCCUPIED
        places = beginnings(canvas.tables.core[heading], occupied, canvas.tables.edge)
        if len(places) == 0:
            return None
        first = Paddle(*places[int(canvas.random.random() * len(places))].tolist(), heading)
        if inside(first, canvas.tables):
            break
    else:
        return None
    contour = Contour(canvas, first)
    if all(contour.extend() for _ in range(DISTRACTOR - 1)):
        canvas.occupy(contour.paddles[-1])
        return contour
    return None


def draw(size: int, seed: int, index: int) -> Drawing:
    """Draw an image, which depends on these numbers alone."""
    random, rules = Random(f"{seed} {index}"), RULES[size]
    label, margin, origin = describe(random, rules)
    found = tables(size, margin)
    while (targets := draw_targets(canvas := Canvas(found, random), rules)) is None:
        pass
    canvas.occupy(targets[1].paddles[-1])  # not of the first: so the public program
    contours = [contour.paddles for contour in [*targets, *draw_distractors(canvas, rules)]]
    edge = found.edge
    light = np.zeros((size + 2 * edge,) * 2)
    for number, paddles in enumerate(contours):
        for paddle in paddles:
            y, x = paddle.y - found.reach, paddle.x - found.reach
            line = found.lines[paddle.heading] * rules.contrasts[number > 1]
            near = light[y : y + len(line), x : x + len(line)]
            np.maximum(near, line, out=near)
    light = light[edge:-edge, edge:-edge]
    ends = contours[origin][0], contours[origin if label else 1 - origin][-1]
    discs = [(end.y - edge, end.x - edge) for end in ends]
    y, x = np.ogrid[: FINER * size, : FINER * size]
    for disc_y, disc_x in discs:
        fine = (y - FINER * disc_y) ** 2 + (x - FINER * disc_x) ** 2 <= (FINER * rules.disc) ** 2
        light = np.maximum(light, shrink(fine.astype(np.uint8) * 255, size))
    image = (light * (255 / light.max()) + 0.5).astype(np.uint8)
    moved = [[Paddle(y - edge, x - edge, heading) for y, x, heading in paddles] for paddles in contours]
    return Drawing(image, label, discs, moved)


def describe(random: Random, rules: Rules) -> tuple[int, int, int]:
    """Draw what is drawn first: label, margin, and at which target's beginning a disc is."""
    return int(random.random() * 2), rules.margins[int(random.random() * len(rules.margins))], int(random.random() * 2)


def name(options: dict[str, Any]) -> str:
    return f"pathfinder{options['size']}"


def contents(options: dict[str, Any]) -> list[str]:
    return [LEVEL, EXAMPLES]


def check(args: Namespace) -> dict[str, Any]:
    """Return the options that the images depend on. Raises UserError for impossible ones."""
    for key, least in (("images", 1), ("workers", 1), ("seed", 0)):
        if (value := vars(args)[key]) < least:
            raise UserError(f"--{key} {value} must be at least {least}")
    return {key: vars(args)[key] for key in ("size", "images", "seed")}


def image_path(folder: Path, index: int) -> Path:
    return folder / LEVEL / "imgs" / str(index // PER_FOLDER) / f"sample_{index % PER_FOLDER}.png"


def metadata_path(folder: Path, number: int) -> Path:
    return folder / LEVEL / "metadata" / f"{number}.npy"


def write(folder: Path, options: dict[str, Any], workers: int) -> dict[str, Any]:
    """Write the images, or what is left of them; return what generated.json says of them.

    A subfolder is finished once its metadata is there; of others, the images that are there are kept. Raises
    OSError."""
    size, images, seed = options["size"], options["images"], options["seed"]
    done = {number for number in range(-(-images // PER_FOLDER)) if metadata_path(folder, number).exists()}
    chunks = [range(start, min(start + CHUNK, images)) for start in range(0, images, CHUNK)]
    left = [chunk for chunk in chunks if chunk[0] // PER_FOLDER not in done]
    for number in {chunk[0] // PER_FOLDER for chunk in left}:
        image_path(folder, number * PER_FOLDER).parent.mkdir(parents=True, exist_ok=True)
    (folder / LEVEL / "metadata").mkdir(parents=True, exist_ok=True)
    start = images - sum(map(len, left))
    drawn, seconds, lines = 0, 0.0, []
    with progress(total=images, initial=start, desc=folder.name, unit=" images") as bar:
        for chunk, result in in_order(functools.partial(write_chunk, folder, size, seed), left, workers):
            lines += result[0]
            drawn, seconds = drawn + result[1], seconds + result[2]
            bar.update(len(chunk))
            if chunk[-1] + 1 in (images, (chunk[0] // PER_FOLDER + 1) * PER_FOLDER):
                write_atomically(metadata_path(folder, chunk[0] // PER_FOLDER), "".join(lines))
                lines = []
    if drawn:
        log.info(f"{drawn:,} images drawn, {1000 * seconds / drawn:.1f} ms of one core each")
    labels = [describe(Random(f"{seed} {index}"), RULES[size])[0] for index in range(images)]
    write_examples(folder, size, labels)
    return {"images": images, "label 0": labels.count(0), "label 1": labels.count(1)}


def write_chunk(folder: Path, size: int, seed: int, chunk: range) -> tuple[list[str], int, float]:
    """Write those images of a chunk that are not there yet; return its lines of metadata, how many images were drawn
    and the seconds that took."""
    lines, drawn, begin = [], 0, time.process_time()
    rules = RULES[size]
    for index in chunk:
        path, number = image_path(folder, index), index % PER_FOLDER
        if not path.exists():
            content = io.BytesIO()
            Image.fromarray(draw(size, seed, index).image).save(content, "PNG")
            write_atomically(path, content.getvalue())
            drawn += 1
        label, margin, _ = describe(Random(f"{seed} {index}"), rules)
        lines.append(
            f"imgs/{path.parent.name} {path.name} {number} {label} {rules.continuity} {TARGET} {DISTRACTOR} "
            f"{rules.length} {rules.thickness} {margin} 1\n"
        )
    return lines, drawn, time.process_time() - begin


def write_examples(folder: Path, size: int, labels: list[int]) -> None:
    """Draw up to four images of each label in one picture."""
    from src import plots

    figure, axes = plots.subplots(2, 4, f"Pathfinder, {size} pixels a side", width=2.2, height=2.4)
    for row, label in zip(axes, (1, 0)):
        indices = [index for index, other in enumerate(labels) if other == label][:4]
        for axis, index in zip(row, [*indices, *[None] * (4 - len(indices))]):
            axis.set_axis_off()
            if index is not None:
                path = image_path(folder, index)
                axis.imshow(np.asarray(Image.open(path)), cmap="gray", vmin=0, vmax=255)
                axis.set_title(f"label {label}: {path.parent.name}/{path.stem}")
    plots.save(figure, folder / EXAMPLES)


def digest(folder: Path, options: dict[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of all metadata and of all images, in order. Raises OSError."""
    images = range(options["images"])
    metadata = (metadata_path(folder, number) for number in range(-(-len(images) // PER_FOLDER)))
    return {
        "metadata": sha256(path.read_bytes() for path in metadata),
        "images": sha256(image_path(folder, index).read_bytes() for index in images),
    }


def report(folder: Path, record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that end the command."""
    labels = f"{record['label 1']:,} with label 1, {record['label 0']:,} with label 0"
    yield f"{folder / LEVEL}: {record['images']:,} images, {labels}"
    yield f"{folder / EXAMPLES}: eight of them"
