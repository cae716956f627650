"""Models of `grace bench step` that no ordinary run of test_step.py trains."""

from __future__ import annotations

import importlib

import pytest


def test_the_resnet_of_tensorflow_has_gradients():
    tf = pytest.importorskip("tensorflow")
    model, loss = importlib.import_module("grace.bench.step.models_tensorflow").MODELS["resnet"]()
    with tf.GradientTape() as tape:
        value = loss()
    gradients = tape.gradient(value, [variable.value for variable in model.trainable_variables])
    assert sum(int(tf.size(gradient)) for gradient in gradients) == 269_722
    assert all(bool(tf.reduce_any(gradient != 0)) for gradient in gradients)
