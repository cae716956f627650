"""Scenarios about refusals, run by each rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import pytest
import tensorflow as tf

import grace
from grace.core.config.registry import About
from grace.core.errors import GraceWarning
from grace.core.guards import agreement
from grace.tensorflow import DistributedGradientTape, Exchange
from tests.adapters.tensorflow.loss_scaling_scenarios import scaled
from tests.adapters.tensorflow.model import sgd, wrap
from tests.adapters.tensorflow.saving_scenarios import Own
from tests.adapters.tensorflow.usage_model import NONE, TOPK, error_of, fit, gradients, net, samples

UNKNOWN = ("compression", "groups", "num_groups", "use_locking", "device_dense", "device_sparse")


def made() -> list[tf.Tensor]:
    """Return the gradients of a first step."""
    return gradients(net(), *map(tf.constant, samples(1, hvd.rank())))


def refused_arguments() -> dict[str, str]:
    """Pass arguments and optimizers that are not supported, equal on all ranks."""

    def attempt(**arguments: Any) -> str:
        return error_of(lambda: wrap(arguments.pop("config", TOPK), **arguments))

    built = sgd()
    built.build(net().trainable_variables)
    tape = tf.GradientTape()
    return {
        **{name: attempt(**{name: 1}) for name in UNKNOWN},
        "second gradients": attempt(config={"compressor": "qsgd", "memory": "marina"}),
        "tape, second gradients": error_of(
            lambda: grace.tensorflow.DistributedGradientTape(tape, {"compressor": "qsgd", "memory": "marina"})
        ),
        "op": attempt(op=hvd.Adasum),
        "predivided sum": attempt(op=hvd.Sum, gradient_predivide_factor=2.0),
        "no factor": attempt(gradient_predivide_factor=0.0),
        "typo": attempt(config={"compressor": "topk", "compres_ratio": 0.1}),
        "typo of an argument": attempt(sparse_as_dens=True),
        "unknown argument": attempt(backward_passes=2),
        "no passes": attempt(backward_passes_per_step=0),
        "passes twice": attempt(optimizer=sgd(gradient_accumulation_steps=2), backward_passes_per_step=2),
        "passes too late": attempt(optimizer=built, backward_passes_per_step=2),
        "wrapped": attempt(optimizer=wrap(TOPK)),
        "wrapped inside": attempt(optimizer=scaled(wrap(TOPK))),
        "version 1": attempt(optimizer=tf.compat.v1.train.GradientDescentOptimizer(0.1)),
        "not an optimizer": attempt(optimizer=net()),
        "process set": attempt(process_set=hvd.ProcessSet([0])),
        "tape, compression": error_of(lambda: DistributedGradientTape(tape, TOPK, compression=1)),
        "tape, op": error_of(lambda: DistributedGradientTape(tape, TOPK, op=hvd.Adasum)),
        "tape, typo": error_of(lambda: DistributedGradientTape(tape, TOPK, compres_ratio=0.1)),
        "tape, typo of an argument": error_of(lambda: DistributedGradientTape(tape, TOPK, sparse_as_dens=True)),
        "exchange, typo of an argument": error_of(lambda: Exchange(TOPK, gradient_predivide=2.0)),
        "tape, twice": error_of(lambda: DistributedGradientTape(tape, Exchange(TOPK), op=hvd.Sum)),
    }


def poor_pairs() -> dict[str, list[str]]:
    """Wrap optimizers with and without momentum, and Adam with topk. Return the warnings."""
    results = {}
    for name, made in (
        ("sgd", sgd),
        ("adam", keras.optimizers.AdamW),
        ("scaled", lambda: scaled(sgd())),
        ("none", lambda: sgd(momentum=0.0)),
        ("ftrl", keras.optimizers.Ftrl),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrap({"compressor": "dgc"}, optimizer=made())
            if name == "adam":
                wrap({"compressor": "topk"}, optimizer=made())
        results[name] = [f"{w.category.__name__}: {w.message}" for w in caught if issubclass(w.category, GraceWarning)]
    return results


class Around(keras.optimizers.SGD):
    """An optimizer that applies gradients itself."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(gradient)


def refused_steps() -> dict[str, str]:
    """Try steps that must fail, equal on all ranks."""
    model = net()
    variables = model.trainable_variables

    def float8() -> None:
        layer = keras.layers.Dense(16, dtype="float8_from_float32")
        layer.build((None, 16))
        optimizer = wrap(TOPK)
        optimizer.build(layer.trainable_variables)

    def late() -> None:
        """Give a variable its first gradient after the first step."""
        optimizer = wrap(TOPK)
        optimizer.apply([*made()[:3], None], variables)
        optimizer.apply(made(), variables)

    around = wrap(TOPK, Around(0.1))
    return {
        "fewer gradients": error_of(lambda: wrap(TOPK).apply(made()[:2], variables)),
        "float8": error_of(float8),
        "late": error_of(late),
        "around": error_of(lambda: around.apply(made(), variables)),
    }


def compiled_by_xla() -> dict[str, str]:
    """Use jit_compile=True in model.compile and tf.function, also on the last rank only, and then without it."""
    results = {}
    last = hvd.rank() == hvd.size() - 1
    model = net()
    for label, jit in {"everywhere": True, "on one rank": last, "nowhere": False}.items():
        model.compile(wrap(TOPK), "mse", jit_compile=jit)
        results[label] = error_of(lambda: fit(model, 1))
    optimizer = wrap(TOPK)
    optimizer.build(model.trainable_variables)
    apply = tf.function(lambda given: optimizer.apply(given, model.trainable_variables), jit_compile=True)
    results["tf.function"] = error_of(lambda: apply(made()))
    return results


def different_ranks() -> dict[str, str]:
    """Make the last rank differ from the others: in its arguments, its variables and its gradients."""
    last = hvd.rank() == hvd.size() - 1

    def one_step(model: keras.Model, given: list[Any], **arguments: Any) -> Callable[[], Any]:
        return lambda: wrap(TOPK, **arguments).apply(given, model.trainable_variables)

    def renamed() -> Callable[[], Any]:
        model = net(name="other" if last else "net")
        return one_step(model, made())

    def taped() -> None:
        model = net()
        with DistributedGradientTape(tf.GradientTape(), {"compressor": "qsgd" if last else "topk"}) as tape:
            loss = tf.reduce_sum(model(samples(1, 0)[0]))
        tape.gradient(loss, model.trainable_variables)

    rows = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([1, 3]), tf.constant([16, 4]))
    mixed = [*made()[:2], rows if last else tf.ones([16, 4]), tf.ones([4])]
    none_by_rule = {"rules": [{"match": "*out/kernel", "compressor": "none"}]}
    too_few = Exchange(NONE)
    too_few.build(net().trainable_variables)
    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setattr(agreement, "WIRE_FORMAT", 0)
        wire = error_of(one_step(net(), made()))
        patch.undo()
        if last:
            patch.setattr(grace.compressors, "about", lambda name: About(payload_format=1 + (name == "signsgd")))
        signs = wrap({"compressor": "signsgd", "default_rules": False})
        payload = error_of(lambda: signs.apply(made(), net().trainable_variables))
    return {
        "configuration": error_of(lambda: wrap({**TOPK, "compress_ratio": 0.5 if last else 0.25})),
        "wire format": wire,
        "payload format": payload,
        "argument": error_of(lambda: wrap(TOPK, sparse_as_dense=last)),
        "typo": error_of(lambda: wrap({"compressor": "topkk" if last else "topk"})),
        "optimizer": error_of(lambda: wrap(TOPK, net() if last else sgd())),
        "variables": error_of(renamed()),
        "kind of gradient": error_of(lambda: wrap({**TOPK, **none_by_rule}).apply(mixed, net().trainable_variables)),
        "densified": error_of(lambda: wrap(TOPK).apply(mixed, net().trainable_variables)),
        "number of gradients": error_of(lambda: too_few(made()[: 3 if last else 4])),
        "tape": error_of(taped),
        "afterwards": error_of(one_step(net(), made())),
    }


def dispatch() -> dict[str, Any]:
    """Call grace.DistributedOptimizer with Keras optimizers and with unsupported objects."""
    wrapped = {
        "keras": grace.DistributedOptimizer(sgd(), TOPK),
        "own": grace.DistributedOptimizer(Own(2.0), config=TOPK),
        "scaled": grace.DistributedOptimizer(scaled(sgd()), compressor="topk"),
    }
    return {
        **{label: [type(o).__name__, o.grace.config.to_dict()["compressor"]["name"]] for label, o in wrapped.items()},
        "version 1": error_of(lambda: grace.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))),
        "model": error_of(lambda: grace.DistributedOptimizer(net(), TOPK)),
        "object": error_of(lambda: grace.DistributedOptimizer(object(), TOPK)),
    }
