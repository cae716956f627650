"""Exchanges of TensorFlow that go on among other ranks: the same as a run makes of its states. One process."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

from grace.core.spec import Ranks  # noqa: E402
from grace.tensorflow.exchange import Exchange  # noqa: E402
from grace.tensorflow.optimizer import OptimizerExchange, _distribute  # noqa: E402
from grace.testing.harness import same  # noqa: E402
from tests.adapters.tensorflow.test_checkpoint_on_other_ranks import SCHEDULE, TOPK, exchange_of, in_variables, trained  # noqa: E402
from tests.core.test_elastic_states import moved  # noqa: E402

SHOTS = {**TOPK, "communicator": "two_shot"}
# Which rank of how many stays, and which one of how many it is then.
MOVES = {"one is gone": (3, 4, 2, 3), "one comes": (1, 2, 1, 3), "one for another": (2, 3, 0, 3)}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"communicator": "two_shot"}, 2),
        ({"communicator": "two_shot", "schedule": SCHEDULE}, 2),
        ({"memory": "lowpass", "communicator": "allgather", "schedule": SCHEDULE}, 3),
    ],
    ids=["shots", "before the second stage", "second stage"],
)
def test_variables_move_as_states_do(options, steps, move, monkeypatch):
    rank, before, number, after = move
    sim = trained(before, steps, **options)
    exchange = exchange_of(rank, before, monkeypatch, **options)
    stages = exchange.run
    exchange.load_state_dict(in_variables(sim.state_dict(), exchange, monkeypatch, **options)[rank])
    # The others that stay come first, so that this one gets its number.
    stay = [*[other for other in range(before) if other != rank][:number], rank]
    expected = moved(sim, stay, after).runs[number]
    monkeypatch.setattr(Exchange, "_rank_of_ranks", lambda self: (number, Ranks(after)))
    assert exchange.move() == (before, after)
    assert exchange.run is not stages
    assert len(exchange._variables) == len(exchange.run.variables)
    assert exchange.run.step == steps
    assert exchange.run.origin.numpy().tolist() == [number, after]
    states, found = exchange.run.stage.read(), 0
    for name, kinds in expected.units.items():
        for kind, state in kinds.items():
            for key, value in state.items():
                found += bool(value.any())
                assert same(states[name][kind][key].numpy(), value), (name, kind, key)
    assert found


# Of Keras, when it saves variables of TensorFlow.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_moved_optimizer_is_saved_whole(monkeypatch, tmp_path):
    def optimizer(size):
        monkeypatch.setattr(Exchange, "_rank_of_ranks", lambda self: (1, Ranks(size)))
        made = _distribute(keras.optimizers.SGD(momentum=0.5, name="sgd"), OptimizerExchange(SHOTS), 1)
        made.build(model.trainable_variables)
        return made

    def contents(of):
        return [np.asarray(v.value) for v in of.variables]

    def alike(a, b):
        return all(same(x, y) for x, y in zip(a, b, strict=True))

    model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(60, name="only")])
    expected = [(v.path, v.shape) for v in optimizer(2).variables]
    moved_on = optimizer(4)
    assert [(v.path, v.shape) for v in moved_on.variables] != expected
    monkeypatch.setattr(Exchange, "_rank_of_ranks", lambda self: (1, Ranks(2)))
    moved_on.grace.move()
    assert [(v.path, v.shape) for v in moved_on.variables] == expected
    for number, variable in enumerate(moved_on.variables):
        variable.assign(tf.fill(variable.shape, tf.cast(number % 2, variable.dtype)))
    saved = contents(moved_on)
    path = tf.train.Checkpoint(optimizer=moved_on).save(str(tmp_path / "checkpoint"))
    model.compile(moved_on, "mse")
    model.save(tmp_path / "model.keras")
    assert alike(contents(keras.models.load_model(tmp_path / "model.keras").optimizer), saved)
    for variable in moved_on.variables:
        variable.assign(tf.zeros_like(variable.value))
    tf.train.Checkpoint(optimizer=moved_on).restore(path).assert_existing_objects_matched()
    assert alike(contents(moved_on), saved)
