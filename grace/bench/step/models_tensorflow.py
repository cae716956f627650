"""The models of `models_torch`, with Keras layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from grace.bench.step.models import CLASSES, HIDDEN, ITEMS, MLP, TOKENS, USERS, VGG, WORDS

layers = keras.layers


def _cross_entropy(labels: Any, logits: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def _integers(shape: tuple[int, ...], most: int) -> Any:
    return tf.random.uniform(shape, 0, most, tf.int32)


def _classifier(model: keras.Model, shape: tuple[int, ...], classes: int) -> tuple[keras.Model, Callable[[], Any]]:
    def loss() -> Any:
        return _cross_entropy(_integers(shape[:1], classes), model(tf.random.normal(shape), training=True))

    return model, loss


def _language(model: keras.Model, batch: int, length: int, most: int) -> tuple[keras.Model, Callable[[], Any]]:
    def loss() -> Any:
        words = _integers((batch, length + 1), most)
        return _cross_entropy(words[:, 1:], model(words[:, :-1], training=True))

    return model, loss


def mlp() -> tuple[keras.Model, Callable[[], Any]]:
    """Return an MLP of three dense layers with 25.2 M parameters, and its loss on four random examples."""
    *hidden, last = MLP[1:]
    # PyTorch's initialization. With it, as many gradients exceed a threshold as in PyTorch.
    weights = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
    stack = [
        keras.Input((MLP[0],)),
        *(layers.Dense(units, "relu", kernel_initializer=weights) for units in hidden),
        layers.Dense(last, kernel_initializer=weights),
    ]
    return _classifier(keras.Sequential(stack), (4, MLP[0]), last)


def vgg() -> tuple[keras.Model, Callable[[], Any]]:
    """Return VGG16 for 32 x 32 images with 15 M parameters, and its loss on two random images."""
    stack: list[Any] = [keras.Input((32, 32, 3))]
    for width in VGG:
        if width is None:
            stack.append(layers.MaxPooling2D(2))
        else:
            stack += [layers.Conv2D(width, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()]
    stack += [layers.Flatten(), layers.Dense(512, "relu"), layers.Dense(CLASSES)]
    return _classifier(keras.Sequential(stack), (2, 32, 32, 3), CLASSES)


def resnet() -> tuple[keras.Model, Callable[[], Any]]:
    """Return ResNet-20 for 32 x 32 images with 0.27 M parameters, and its loss on eight random images."""

    def convolve(x: Any, width: int, stride: int = 1) -> Any:
        x = layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    given = keras.Input((32, 32, 3))
    x, channels = layers.ReLU()(convolve(given, 16)), 16
    for width in (16, 32, 64):
        for i in range(3):
            stride = 2 if i == 0 and width > 16 else 1
            straight = layers.AveragePooling2D(1, stride)(x) if stride > 1 else x
            if width > channels:
                straight = layers.Concatenate()([straight, straight])
                channels = width
            found = convolve(layers.ReLU()(convolve(x, width, stride)), width)
            x = layers.ReLU()(layers.Add()([found, straight]))
    x = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))
    return _classifier(keras.Model(given, x), (8, 32, 32, 3), CLASSES)


def lstm() -> tuple[keras.Model, Callable[[], Any]]:
    """Return a language model with two LSTM layers of 650 units and 19.8 M parameters.

    Its loss is for two random sequences of eight words.
    """
    stack = [
        keras.Input((8,), dtype="int32"),
        layers.Embedding(WORDS, HIDDEN),
        layers.LSTM(HIDDEN, return_sequences=True),
        layers.LSTM(HIDDEN, return_sequences=True),
        layers.Dense(WORDS),
    ]
    return _language(keras.Sequential(stack), 2, 8, WORDS)


def ncf() -> tuple[keras.Model, Callable[[], Any]]:
    """Return a neural collaborative filter of the size of MovieLens-20M with 31.8 M parameters.

    Its loss is for 256 random pairs of user and item.
    """
    user, item = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    u, i = layers.Embedding(USERS, 192)(user), layers.Embedding(ITEMS, 192)(item)
    wide = layers.Multiply()([u[:, :64], i[:, :64]])
    deep = layers.Concatenate()([u[:, 64:], i[:, 64:]])
    for units in (256, 128, 64):
        deep = layers.Dense(units, "relu")(deep)
    model = keras.Model([user, item], layers.Dense(1)(layers.Concatenate()([wide, deep])))

    def loss() -> Any:
        found = model([_integers((256,), USERS), _integers((256,), ITEMS)], training=True)
        labels = tf.cast(_integers((256, 1), 2), tf.float32)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, found))

    return model, loss


def transformer() -> tuple[keras.Model, Callable[[], Any]]:
    """Return a Transformer of four encoder layers of width 512, with 8,000 tokens and 20.8 M parameters.

    Its loss is for two random sequences of 16 tokens.
    """
    given = keras.Input((16,), dtype="int32")
    x = layers.Embedding(TOKENS, 512)(given)
    for _ in range(4):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(8, 64)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(512)(layers.Dense(2048, "relu")(x)))
    return _language(keras.Model(given, layers.Dense(TOKENS)(x)), 2, 16, TOKENS)


MODELS: dict[str, Callable[[], tuple[keras.Model, Callable[[], Any]]]] = {
    "mlp": mlp,
    "vgg": vgg,
    "lstm": lstm,
    "ncf": ncf,
    "resnet": resnet,
    "transformer": transformer,
}
