"""Checks of the variables that Keras saved with an optimizer, before any of them is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grace.core.errors import StateError
from grace.core.state.checks import nonfinite, show


def check_saved_variables(variables: Sequence[Any], store: Mapping[str, Any]) -> None:
    """Raise StateError unless `store` holds a value for each variable, of its shape and kind of number.

    If the number of variables differs, Keras would warn and load none. If some shapes differ, it would load the others.
    """
    places = {str(i): variable for i, variable in enumerate(variables)}
    different = sorted(set(places) ^ set(store.keys()))
    if different:
        raise StateError(
            f"checkpoint: expected {len(places)} variables of the optimizer, received {len(set(store.keys()))}. Use "
            "the configuration it was saved with, including granularity, bucket_bytes and split_bytes."
        )
    for place, variable in places.items():
        try:
            found = np.asarray(store[place])
        except Exception as error:
            # The library that reads the file has errors of many classes.
            raise StateError(
                f"checkpoint, variable '{variable.path}': expected an array, received none "
                f"({type(error).__name__}: {error}). The file is damaged; load another one."
            ) from error
        whole = variable.dtype.startswith(("int", "uint"))
        # bfloat16 is of kind V.
        fits = found.dtype.kind in ("iu" if whole else "fV") and found.shape == tuple(variable.shape)
        counts = variable.path.endswith(("iteration", "grace_step"))
        if not fits or (counts and found < 0):
            raise StateError(
                f"checkpoint, variable '{variable.path}': expected {variable.dtype} {tuple(variable.shape)}"
                f"{' from 0 on' if counts else ''}, received {show(found)}. The file is damaged, or belongs to "
                "another optimizer; use the configuration it was saved with."
            )
        if variable.path.rpartition("/")[2].startswith("grace_"):
            check_finite(variable.path, found)


def check_finite(name: str, saved: Any) -> None:
    """Raise StateError if a saved state has NaN or infinity."""
    array = np.asarray(saved)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise nonfinite(f"variable '{name}'")
