"""Drawn cases end in a result or in an error of grace, in bounded memory and time; `--all` runs 200,000."""

from __future__ import annotations

import numpy as np
import pytest

import grace
from grace.core.config.config import make_config
from grace.core.errors import ConfigError, StepError
from grace.testing.harness import FRAMEWORKS
from tests.support import fuzz

# A case repeats itself from its number. One test of all would keep a worker busy to the end.
SHARE = 10_000
SHARES = [
    (kind, first, min(SHARE, fuzz.count(kind) - first))
    for kind in fuzz.COUNTS
    if not kind.startswith(("wire", "checksum")) or kind.split()[1].partition("-")[0] in FRAMEWORKS
    for first in range(0, fuzz.count(kind), SHARE)
]
# Cases that failed when the fuzzer was written, beside those of test_damaged_payloads.py and test_errors.py.
FOUND = [("gradient", 2143), ("gradient", 20865), ("states of ranks", 423)]
# The number of a configuration depends on the names of all options.
FOUND_CONFIGS = [
    {"compressor": "threshold", "threshold": 0.01, "beta": 1e300, "gradient_clipping": 10**400},
    {"compressor": "sketchml", "gradient_clipping": None, "lr_correction": [], "compress_ratio": 10**400},
    {"compressor": "qsgd", "quantizer": False, "norm": np.array([]), "match": "topk"},
]


@pytest.mark.parametrize(("kind", "first", "number"), SHARES, ids=lambda value: str(value).replace(" ", "-"))
def test_every_case_ends_in_a_result_or_an_error_of_grace(kind, first, number):
    results = fuzz.run(kind, first, number)
    if kind.startswith("checksum"):
        assert results == 0, "a checksum refuses every damaged buffer"
        return
    assert 0 < results < number, "the cases must be neither all harmless nor all refused"


def test_an_ordinary_run_draws_thousands_of_cases_and_all_many_more():
    ordinary, everything = (sum(counts) for counts in zip(*fuzz.COUNTS.values(), strict=True))
    assert 1000 < ordinary < 10_000
    assert everything == 200_000


@pytest.mark.parametrize(("kind", "number"), FOUND)
def test_what_the_fuzzer_has_found_stays_mended(kind, number):
    fuzz.run(kind, number, 1)


@pytest.mark.parametrize("config", FOUND_CONFIGS, ids=lambda config: config["compressor"])
def test_configurations_that_the_fuzzer_has_found_stay_mended(config):
    with pytest.raises(ConfigError, match=", option '"):
        make_config(config)


def test_a_whole_number_beyond_all_floats_is_no_ratio():
    with pytest.raises(ConfigError, match="option 'compress_ratio': expected float, received 1000"):
        make_config({"compressor": "topk", "compress_ratio": 10**400})


def test_a_gradient_of_another_dtype_is_refused():
    sim = grace.Simulation(1, {"a": (3,)}, {"compressor": "none"})
    with pytest.raises(StepError, match="expected a gradient of float32 for tensor 'a', received int32"):
        sim.step([{"a": np.zeros(3, np.int32)}])


def test_a_failure_names_the_case(monkeypatch):
    def fails(rng):
        raise KeyError(rng.random())

    monkeypatch.setattr(fuzz, "_config", fails)
    with pytest.raises(fuzz.CaseError, match=r"KeyError: .*\nrepeat it with: python -m tests.support.fuzz 'config' 7$"):
        fuzz.run("config", 7, 3)


def test_memory_and_time_are_limited(monkeypatch):
    monkeypatch.setattr(fuzz, "_config", lambda rng: bool(np.zeros(fuzz.MEMORY, np.uint16).any()))
    with pytest.raises(fuzz.CaseError, match="MemoryError"):
        fuzz.run("config", 0, 1)
    monkeypatch.setattr(fuzz, "SECONDS", 1)

    def hangs(rng):
        while True:
            rng.random()

    monkeypatch.setattr(fuzz, "_config", hangs)
    with pytest.raises(fuzz.CaseError, match="took more than 1 s"):
        fuzz.run("config", 0, 1)
