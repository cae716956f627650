"""The watch over steps in graphs ends a process that waits, and no other. One process plays two ranks."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from grace.tensorflow import waiting
from grace.tensorflow.waiting import Watch


@pytest.fixture
def ended(monkeypatch):
    """Record what would end this process."""
    errors = []
    monkeypatch.setattr(waiting, "end_process", errors.append)
    return errors


def step_of(watch, release):
    """Return a step that waits until it is released, and fails if it was not."""

    def wait():
        return np.float32(release.wait(4))

    @tf.function(autograph=False)
    def step(number):
        x = tf.ones([])
        watch.begin(number, [x])
        waited = tf.numpy_function(wait, [], tf.float32)
        with tf.control_dependencies([tf.debugging.assert_equal(waited, 1.0)]):
            waited = tf.identity(waited)
        watch.end([waited])
        return waited

    return step


def test_no_step_ends_the_process_before_horovod_misses_a_rank(monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_TIMEOUT_SECONDS", raising=False)
    assert (waiting.elastic_timeout(5), waiting.elastic_timeout(300)) == (60, 300)
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "200")
    assert waiting.elastic_timeout(300) == 400


def test_a_step_that_waits_ends_the_process_and_one_that_failed_does_not(ended):
    release = threading.Event()
    watch = Watch(0, 2, 1, lambda: "the gradient of 'w'")
    step = step_of(watch, release)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant(7, tf.int64))
    (error,) = ended
    assert "rank 0 of 2 has waited 1 s for rank 1: step 7, the gradient of 'w'" in str(error)
    # The step has not ended, but this process goes on, also with TensorFlow.
    assert watch.under_way() == 7
    end = time.monotonic() + 4
    while time.monotonic() < end:
        tf.ones([]).numpy()
        time.sleep(0.01)
    release.set()
    step(tf.constant(7, tf.int64))
    assert watch.under_way() is None
    assert len(ended) == 1
