"""Errors that grace raises on purpose; each says what, expected, received and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class GraceError(Exception):
    """Base class of all errors raised by grace."""


class GraceWarning(UserWarning):
    """Settings or a checkpoint that can be used, but probably not as intended."""


class ConfigError(GraceError, ValueError):
    """Invalid configuration: an unknown key, a wrong type, a value out of range."""


class IncompatibleError(GraceError, ValueError):
    """Components that are valid alone but cannot work together; raised when they are combined."""


class PayloadError(GraceError, ValueError):
    """Payload that differs from what the compressor's `wire` announced, or that is damaged."""


class StepError(GraceError, RuntimeError):
    """Wrong order of calls in a training step: a gradient twice, missing, or of another shape."""


class StateError(GraceError, ValueError):
    """Checkpoint that does not fit the optimizer it is loaded into."""


class MismatchError(GraceError, RuntimeError):
    """Ranks that were started with different configurations or different parameters."""


class WaitError(GraceError, TimeoutError):
    """Rank that has waited for the others longer than the configuration's `timeout`."""


# What else users call an option, in other libraries and papers: the names that grace has for it.
SYNONYMS = {
    **dict.fromkeys(("ratio", "rate", "k", "topk", "density", "sparsity", "fraction"), ("compress_ratio",)),
    **dict.fromkeys(("rank", "r", "lowrank", "matrixapproximationrank"), ("compress_rank",)),
    **dict.fromkeys(("bit", "bits", "nbits", "numbits", "bitwidth"), ("bits", "width", "quantum_num", "format")),
    **dict.fromkeys(("level", "levels", "numlevels", "s", "quantum"), ("quantum_num",)),
    **dict.fromkeys(("blocksize", "bucketsize", "groupsize", "bucket", "block"), ("bucket_size", "block_size")),
    **dict.fromkeys(("tau", "cutoff"), ("threshold",)),
    **dict.fromkeys(("clip", "clipping", "maxnorm", "clipnorm"), ("gradient_clipping", "clip_factor")),
    **dict.fromkeys(("learningrate",), ("lr",)),
    **dict.fromkeys(("method", "algorithm", "compression"), ("compressor",)),
    **dict.fromkeys(("errorfeedback", "ef", "feedback", "usememory"), ("memory",)),
    **dict.fromkeys(("collective", "comm", "topology"), ("communicator",)),
    **dict.fromkeys(("entropycoding", "encoding", "lossless"), ("coding",)),
    **dict.fromkeys(("warmup", "warmupiters", "warmupepochs"), ("warmup_steps",)),
    **dict.fromkeys(("buckets", "bucketcapmb", "fusionthreshold"), ("bucket_bytes",)),
    **dict.fromkeys(("randomseed",), ("seed",)),
    **dict.fromkeys(("errordecay", "efdecay"), ("beta",)),
}
# Options that are in other units than the words for them.
_UNITS = {"compress_ratio": "the share of the elements that is sent", "quantum_num": "the number of levels"}
# Candidates in an error.
MOST = 5


def fold(name: str) -> str:
    """Return a name as it is compared: without case, hyphens, underscores and spaces."""
    return re.sub(r"[-_ ]", "", name).lower()


def meant(name: object, valid: Iterable[str]) -> list[str]:
    """Return the valid names that were probably meant: synonyms, the same word in another form, or a similar one."""
    names, text = sorted(set(valid)), str(name)
    synonyms = [known for known in SYNONYMS.get(fold(text), ()) if known in names]
    alike = [known for known in names if fold(known) == fold(text)]
    return synonyms or alike[:1] or difflib.get_close_matches(text, names, n=1)


def nearest(name: object, valid: Iterable[str]) -> str:
    """Return the end of an error message: what was probably meant, and at most five of the valid names."""
    names = sorted(set(valid))
    found = meant(name, names)
    # A similar word is a slip of the pen, and another word may mean another unit.
    units = _UNITS if fold(str(name)) in SYNONYMS else {}
    hints = [f"'{known}'" + (f", {units[known]}" if known in units else "") for known in found]
    hint = f" Did you mean {' or '.join(hints)}?" if hints else ""
    if len(names) <= MOST:
        return f"{hint} Valid names: {', '.join(names)}."
    closest = dict.fromkeys([*found, *difflib.get_close_matches(str(name), names, n=MOST, cutoff=0)])
    return f"{hint} The closest of {len(names)} valid names: {', '.join(list(closest)[:MOST])}."
