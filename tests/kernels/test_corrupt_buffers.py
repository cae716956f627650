"""Truncated or damaged wire buffers give an error or numbers of the announced shape, never a crash."""

from __future__ import annotations

import os
import warnings

import hypothesis
import hypothesis.strategies as st
import numpy as np

from grace.core.errors import PayloadError
from grace.core.methods.compressor import Compressor
from grace.core.ops import get_ops
from grace.core.wire.layout import GatherLayout
from grace.testing.harness import host
from tests import golden
from tests.kernels import BACKENDS, needs_kernels
from tests.support import registered
from tests.support.covering import ALL
from tests.support.steps import TYPICAL, each

pytestmark = needs_kernels
# With sanitizers, which take many times as long, the fuzzer sends more buffers (test_sanitizers.py).
EXAMPLES = 10 if "GRACE_NATIVE" in os.environ and not ALL else 40
settings = hypothesis.settings(derandomize=True, database=None, deadline=None, max_examples=EXAMPLES, print_blob=False)


def decoded(compressor: Compressor, framework: str, data: bytes):
    """Decode the bytes of one rank as a step does."""
    ops = get_ops(framework, native=True)
    spec = golden.spec(compressor)
    layout = GatherLayout([spec], [compressor.wire(spec)], [True])
    buffer = ops.cast(np.frombuffer(data, np.uint8).copy(), "uint8")
    payloads, _, _ = layout.decode(ops, buffer, 1, golden.STEP)
    ex = golden.made(compressor, ops)
    return host(ops, compressor.decompress({**ex.payloads[0], **payloads[0][0]}, ex.sites[0]))


# The kernels are the same in all frameworks.
@each(chosen=TYPICAL, framework=BACKENDS)
@settings
@hypothesis.given(data=st.data())
def test_damaged_buffers(framework, chosen, data):
    compressor = chosen.compressor
    good = bytearray(golden.read(registered.name(compressor)))
    kind = data.draw(st.sampled_from(["flip", "cut", "noise", "words"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    if kind == "flip":
        for _ in range(data.draw(st.integers(1, 4))):
            good[rng.integers(len(good))] ^= 1 << int(rng.integers(8))
    elif kind == "cut":
        good = good[: data.draw(st.integers(0, len(good) - 1))]
    elif kind == "noise":
        good = bytearray(rng.bytes(len(good)))
    else:
        at = 4 * int(rng.integers(len(good) // 4))
        good[at : at + 4] = int(data.draw(st.integers(-(2**31), 2**31 - 1))).to_bytes(4, "little", signed=True)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            found = decoded(compressor, framework, bytes(good))
        except PayloadError as error:
            hypothesis.note(str(error))
        else:
            assert found.shape == (golden.spec(compressor).numel,)
            assert found.dtype == np.float32
