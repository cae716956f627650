"""A saved state of a Keras optimizer is loaded as a whole, or refused as a whole."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from grace.core.config.config import change_config
from grace.core.errors import StateError

keras = pytest.importorskip("keras")
pytest.importorskip("horovod.tensorflow")
h5py = pytest.importorskip("h5py")

from grace.tensorflow.optimizer import OptimizerExchange, _distribute  # noqa: E402


def model(dtype="float32", value=0.0):
    layer = keras.layers.Dense(4, name="a", dtype=dtype)
    net = keras.Sequential([keras.Input((8,)), layer], name="net")
    plain = keras.optimizers.SGD(momentum=0.5, name="sgd")
    optimizer = _distribute(plain, OptimizerExchange({"compressor": "topk", "default_rules": False}), 1)
    net.compile(optimizer, "mse")
    optimizer.build(net.trainable_variables)
    for variable in optimizer.variables:
        if value and variable.dtype.startswith(("float", "bfloat")):
            variable.assign(variable + value)
    return net


def saved(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


def contents(optimizer):
    return [np.asarray(v).astype(np.float64).tolist() for v in optimizer.variables]


class Unreadable(dict):
    def __getitem__(self, key):
        if key == "6":
            raise OSError("the disk is gone")
        return super().__getitem__(key)


# Variables: 0 iteration, 1 learning rate, 2 and 3 momenta, 4 step, 5 origin, 6 residual.
DAMAGE = {
    "one too few": (lambda s: {k: v for k, v in s.items() if k != "6"}, "expected 7 variables of the optimizer"),
    "one too many": (lambda s: {**s, "7": s["6"]}, "expected 7 variables .* received 8"),
    "other names": (lambda s: {f"v{k}": v for k, v in s.items()}, "expected 7 variables"),
    "nothing": (lambda s: {}, "expected 7 variables .* received 0"),
    "another shape": (
        lambda s: {**s, "6": s["6"][:-1]},
        r"_residual': expected float32 \(36,\), received float32 \(35,\)",
    ),
    "another shape of Keras": (lambda s: {**s, "2": s["2"].T}, r"momentum': expected float32 \(8, 4\)"),
    "another kind": (lambda s: {**s, "6": np.array(["x"] * 36)}, "_residual': expected float32"),
    "a fraction": (lambda s: {**s, "4": np.float32(1.5)}, r"grace_step': expected int64 \(\) from 0 on"),
    "before the start": (lambda s: {**s, "4": np.int64(-1)}, "grace_step': expected int64"),
    "NaN": (lambda s: {**s, "6": s["6"] * np.float32("nan")}, "_residual': expected finite numbers, received NaN"),
    "unreadable": (Unreadable, r"_residual': expected an array, received none \(OSError: the disk is gone\)"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_refused_as_a_whole(damage):
    change, text = DAMAGE[damage]
    store, optimizer = saved(model(value=1.0).optimizer), model().optimizer
    before = contents(optimizer)
    with pytest.raises(StateError, match=f"^checkpoint.*{text}"):
        optimizer.load_own_variables(change(store))
    assert contents(optimizer) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_good_state_is_loaded(dtype):
    source, optimizer = model(dtype, value=1.0).optimizer, model(dtype).optimizer
    assert contents(optimizer) != contents(source)
    optimizer.load_own_variables(saved(source))
    assert contents(optimizer) == contents(source)


# Keras converts its variables by a call that NumPy 2 has deprecated.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras_shows_the_error_of_a_damaged_file(tmp_path):
    net, file = model(), tmp_path / "model.keras"
    net.save(file)
    assert contents(keras.models.load_model(file).optimizer) == contents(net.optimizer)
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    data = io.BytesIO(parts["model.weights.h5"])
    with h5py.File(data, "r+") as stored:
        group = stored["optimizer/vars"]
        del group["6"]
        group["6"] = np.zeros(35, np.float32)
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in {**parts, "model.weights.h5": data.getvalue()}.items():
            archive.writestr(name, part)
    with pytest.raises(ValueError, match=r"checkpoint, variable 'sgd/grace_.*_residual': expected float32 \(36,\)"):
        keras.models.load_model(file)


def test_variables_keep_their_order_after_a_change_with_outer_steps():
    exchange = OptimizerExchange({"compressor": "topk", "default_rules": False, "outer": {"every": 4, "delay": 2}})
    net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    net.compile(_distribute(keras.optimizers.SGD(momentum=0.5), exchange, 1), "mse")
    net.optimizer.build(net.trainable_variables)
    config = change_config(exchange.config, {"compressor": "powersgd"})
    exchange.run.change(exchange._plan_of(config))
    exchange.history.append(exchange.config)
    exchange.config = config
    again = type(net.optimizer).from_config(net.optimizer.get_config())
    again.build(net.trainable_variables)
    again.load_own_variables(saved(net.optimizer))
    assert contents(again) == contents(net.optimizer)
