"""Kernels write long fields straight to the wire buffer, with the same bytes as by a copy."""

from __future__ import annotations

import pytest

from grace.core.config.registry import compressors, memories
from grace.core.ops import get_ops
from grace.core.spec import Field, TensorSpec
from grace.core.state.states import initial
from grace.core.step.unit_step import UnitStep
from grace.core.wire import layout as layouts
from grace.core.wire.layout import GatherLayout
from grace.testing.harness import FRAMEWORKS, array, draw, host, same, unit_of
from tests.support.steps import METHODS, TYPICAL, assert_same, each, simulate, states, step

# TensorFlow's arrays are immutable.
IN_PLACE = [name for name in FRAMEWORKS if name != "tensorflow"]
DIRECT = ["qsgd", "terngrad", "natural", "eightbit", "nuqsgd", "eden", "lpc", "fp16"]
SPEC = TensorSpec("t", (1003,))


@pytest.fixture
def short(monkeypatch):
    """Let fields count as long that fit into a test."""
    monkeypatch.setattr(layouts, "_LONG", 64)


def with_kernels(framework):
    ops = get_ops(framework)
    if not ops.runs_kernels:
        pytest.skip("there are no kernels")
    return ops


def begun(unit, ops, place):
    """Return a step of a unit that has compressed a gradient, with its payload in place if there is one."""
    step = UnitStep(unit, initial(unit, ops, 1, 0), ops, seed=1, step=3, rank=0, size=2)
    step.write_to(place)
    step.begin(array(ops, draw(SPEC, 1), SPEC.work_dtype))
    return step


@pytest.mark.parametrize("framework", IN_PLACE)
@pytest.mark.parametrize("name", DIRECT)
def test_the_longest_field_is_not_copied(name, framework, short):
    ops, compressor = with_kernels(framework), compressors.example(name)
    unit = unit_of(compressor, memories.make("none"), SPEC)
    layout = GatherLayout([SPEC], [unit.fields], [True])
    buffer = layout.buffer(ops)
    steps = [begun(unit, ops, place) for place in (None, buffer.places["t"])]
    copied, direct = (
        layout.encode(ops, [step.payload], [False], 3, given) for step, given in zip(steps, (None, buffer), strict=True)
    )
    assert direct is buffer.data
    assert same(host(ops, copied), host(ops, direct))


@pytest.mark.parametrize("framework", IN_PLACE)
def test_a_field_elsewhere_is_copied_and_leaves_the_buffer_alone(framework, short):
    ops = with_kernels(framework)
    unit = unit_of(compressors.make("qsgd"), memories.make("none"), SPEC)
    layout = GatherLayout([SPEC], [unit.fields], [True])
    buffer = layout.buffer(ops)
    buffer.places["t"][:] = 7
    step = begun(unit, ops, None)
    made = layout.encode(ops, [step.payload], [False], 3, buffer)
    assert made is not buffer.data
    assert same(host(ops, made), host(ops, layout.encode(ops, [step.payload], [False], 3)))
    assert (host(ops, buffer.places["t"]) == 7).all()


@pytest.mark.parametrize("framework", IN_PLACE)
def test_every_unit_with_a_long_field_has_a_place(framework, short):
    ops, specs = with_kernels(framework), [TensorSpec(name, (10,)) for name in "abc"]
    fields = [
        [Field("scale", "float64", 1), Field("codes", "uint8", 100)],
        [Field("codes", "uint8", 63)],
        [Field("values", "float32", 16), Field("codes", "uint8", 65), Field("half", "float16", 40)],
    ]
    buffer = GatherLayout(specs, fields, [True] * 3).buffer(ops)
    assert {name: (ops.dtype(x), ops.length(x)) for name, x in buffer.places.items()} == {
        "a": ("uint8", 100),
        "c": ("float16", 40),
    }
    payloads = [{f.name: array(ops, range(f.length), f.dtype) for f in own} for own in fields]
    layout = GatherLayout(specs, fields, [True] * 3)
    for name, i, field in (("a", 0, "codes"), ("c", 2, "half")):
        buffer.places[name][:] = payloads[i][field]
    in_place = [dict(payload) for payload in payloads]
    in_place[0]["codes"], in_place[2]["half"] = buffer.places["a"], buffer.places["c"]
    direct = layout.encode(ops, in_place, [False, True, False], 9, buffer)
    assert direct is buffer.data
    assert same(host(ops, direct), host(ops, layout.encode(ops, payloads, [False, True, False], 9)))


def test_there_is_no_buffer_where_it_does_not_pay():
    long, ops = Field("codes", "uint8", 1 << 20), get_ops("numpy")

    def buffer(*fields, checksum=False, of=ops):
        return GatherLayout([SPEC], [fields], [True], checksum).buffer(of)

    assert (buffer(long) is not None) is ops.runs_kernels
    assert buffer(Field("codes", "uint8", (1 << 20) - 1)) is None
    assert buffer(Field("codes", "uint8", 1 << 20, wire=False), Field("scale", "float32", 1)) is None
    assert buffer(long, Field("values", "float32", "kept")) is None
    assert buffer(long, checksum=True) is None
    for framework in FRAMEWORKS:
        if framework not in IN_PLACE:
            assert buffer(long, of=get_ops(framework)) is None


@pytest.mark.parametrize("framework", IN_PLACE)
def test_room_has_the_length_that_was_asked_for(framework):
    ops = with_kernels(framework)
    for nbytes in (0, 1, 1003):
        room = ops.room(nbytes)
        assert (ops.dtype(room), ops.length(room)) == ("uint8", nbytes)
        room[:] = 5
        assert (host(ops, room) == 5).all()
    with pytest.raises(ValueError, match="expected a length from 0 on, received -1"):
        ops.room(-1)


@pytest.mark.parametrize("framework", IN_PLACE)
def test_a_step_sends_the_buffer_to_which_its_kernels_have_written(framework, short, monkeypatch):
    with_kernels(framework)
    sent, encode = [], GatherLayout.encode

    def told(self, ops, payloads, flags, stamp, buffer=None):
        made = encode(self, ops, payloads, flags, stamp, buffer)
        sent.append(buffer is not None and made is buffer.data)
        return made

    monkeypatch.setattr(GatherLayout, "encode", told)
    sim = simulate(METHODS["qsgd"], framework, size=2, specs=[SPEC])
    step(sim, 0)
    assert sent == [True, True]


@each(
    chosen=TYPICAL,
    size=[1, 2, 3],
    framework=IN_PLACE,
)
def test_a_step_gives_the_same_bits(chosen, size, framework, monkeypatch):
    """All payloads travel as by a copy, in buckets of several units, and of compressors that negotiate."""
    plain = simulate(chosen, framework, size=size)
    expected = [step(plain, number) for number in range(3)]
    monkeypatch.setattr(layouts, "_LONG", 1)
    direct = simulate(chosen, framework, size=size)
    for number in range(3):
        assert_same(expected[number], step(direct, number))
    assert_same(states(plain), states(direct))
