"""The paper's data sets: which task takes which, and where their files are in a folder."""

from __future__ import annotations

from pathlib import Path

from grace.core.errors import ConfigError

# By task; the others have their own data only.
DATA_SETS = {"cnn": "CIFAR-10", "resnet": "CIFAR-10", "lstm": "Penn Treebank", "ncf": "MovieLens-20M"}
# What results say of the data that the tasks have otherwise.
BUILT_IN = "built in"
CIFAR = "Unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz of the data set CIFAR-10 there."
PTB = "Unpack simple-examples.tgz, the Penn Treebank as Mikolov prepared it, there."
MOVIELENS = "Unpack ml-20m.zip of the data set MovieLens-20M there."
_BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
# By data set: names of its files and the folder that the archive has them in, for each form, and how to get them.
_FORMS = {
    "CIFAR-10": (
        [([f"{name}.bin" for name in _BATCHES], "cifar-10-batches-bin"), (_BATCHES, "cifar-10-batches-py")],
        CIFAR,
    ),
    "Penn Treebank": ([(["ptb.train.txt", "ptb.valid.txt"], "simple-examples/data")], PTB),
    "MovieLens-20M": ([(["ratings.csv"], "ml-20m")], MOVIELENS),
}


def files(data_set: str, folder: Path) -> list[Path]:
    """Return the files of a data set in a folder, or in that of its archive there.

    Raises ConfigError if files lack.
    """
    forms, origin = _FORMS[data_set]
    for names, within in forms:
        places = [folder, folder / within]
        place = max(places, key=lambda place: sum((place / name).is_file() for name in names))
        found = [place / name for name in names]
        lacking = [path.name for path in found if not path.is_file()]
        if not lacking:
            return found
        if len(lacking) < len(found):
            raise ConfigError(f"{place} lacks {', '.join(lacking)}. {origin}")
    names, within = forms[0]
    raise ConfigError(f"{folder} has no {names[0]}, nor has its folder {within}. {origin}")
