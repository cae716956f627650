"""The plan assigns a method and a bucket to every tensor, and the report shows it."""

from __future__ import annotations

import pytest

import grace
from grace.core.config.config import default_rules, make_config
from grace.core.config.registry import compressors, memories
from grace.core.errors import ConfigError
from grace.core.plan.plan import early_warnings, make_plan
from grace.core.plan.unit import GRAIN
from grace.core.spec import Ranks, TensorSpec

TOPK = {"compressor": "topk", "compress_ratio": 0.01}


def used(specs, **config):
    """Return the compressor of every tensor by name."""
    plan = make_plan(specs, make_config({**TOPK, **config}))
    return {item.spec.name: compressors.name_of(item.compressor) for item in plan.assignments}


def rule(compressor="qsgd", **conditions):
    return {"compressor": compressor, **conditions}


# --- rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "fits"),
    [
        ({"match": "encoder.*"}, {"encoder.w", "encoder.half"}),
        ({"match": ["*.w", "vec?or"]}, {"encoder.w", "head.w", "vector"}),
        ({"match": "*"}, {"encoder.w", "encoder.half", "head.w", "vector", "scalar"}),
        ({"match": "ENCODER.*"}, set()),
        ({"min_numel": 4096}, {"encoder.w", "vector"}),
        ({"min_numel": 4097}, {"vector"}),
        ({"max_numel": 1}, {"scalar"}),
        ({"min_numel": 2, "max_numel": 1024}, {"encoder.half", "head.w"}),
        ({"min_ndim": 2}, {"encoder.w", "encoder.half", "head.w"}),
        ({"max_ndim": 1}, {"vector", "scalar"}),
        ({"min_ndim": 1, "max_ndim": 1}, {"vector"}),
        ({"dtype": "float16"}, {"encoder.half"}),
        ({"match": "encoder.*", "dtype": "float32"}, {"encoder.w"}),
    ],
)
def test_conditions_of_a_rule(conditions, fits):
    specs = [
        TensorSpec("encoder.w", (64, 64)),
        TensorSpec("encoder.half", (32, 32), "float16"),
        TensorSpec("head.w", (32, 32)),
        TensorSpec("vector", (70000,)),
        TensorSpec("scalar", ()),
    ]
    found = used(specs, default_rules=False, rules=[rule(**conditions)])
    assert {name for name, compressor in found.items() if compressor == "qsgd"} == fits
    assert {name for name, compressor in found.items() if compressor == "topk"} == set(found) - fits


def test_the_first_rule_that_fits_wins():
    specs = [TensorSpec("w", (64, 64))]
    rules = [rule("qsgd", match="x"), rule("onebit", match="w"), rule("terngrad")]
    assert used(specs, rules=rules) == {"w": "onebit"}


def test_a_rule_of_the_user_comes_before_the_default_rules():
    specs = [TensorSpec("layer.bias", (64,))]
    assert used(specs) == {"layer.bias": "none"}
    assert used(specs, rules=[rule(match="*bias*")]) == {"layer.bias": "qsgd"}


@pytest.mark.parametrize(
    ("name", "shape", "dense"),
    [
        ("w", (31, 33), True),
        ("w", (32, 32), False),
        ("w", (1023,), True),
        ("w", (65535,), True),
        ("w", (65536,), False),
        ("layer.bias", (100000,), True),
        ("encoder.LayerNorm.weight", (100000,), False),
        ("encoder.layer_norm.weight", (100000,), True),
        ("bn1.weight", (100000,), True),
        ("gamma", (100000,), True),
        ("beta", (100000,), True),
        ("norm_of_a_matrix", (100, 1000), False),
        ("bias_table", (100, 1000), False),
        ("scalar", (), True),
        ("empty", (0,), True),
    ],
)
def test_default_rules_keep_small_tensors_biases_and_norms_dense(name, shape, dense):
    assert used([TensorSpec(name, shape)])[name] == ("none" if dense else "topk")
    assert used([TensorSpec(name, shape)], default_rules=False)[name] == "topk"


def test_a_tensor_that_does_not_suit_the_method_stays_dense_with_the_reason():
    config = make_config(compressor="powersgd", default_rules=False)
    plan = make_plan([TensorSpec("v", (5000,)), TensorSpec("w", (100, 100))], config)
    reasons = {item.spec.name: (compressors.name_of(item.compressor), item.reason) for item in plan.assignments}
    assert reasons["w"] == ("powersgd", "")
    assert reasons["v"][0] == "none"
    assert "matrix" in reasons["v"][1]


# --- buckets ----------------------------------------------------------------------------------------------------


def names(plan):
    """Return the names of the tensors in every bucket."""
    return [[piece.tensor for unit in bucket.units for piece in unit.pieces] for bucket in plan.buckets]


def test_buckets_follow_the_backward_pass():
    """The backward pass computes gradients from the last layer to the first."""
    specs = [TensorSpec(f"w{i}", (32, 32)) for i in range(5)]
    # 4,096 bytes each.
    assert names(make_plan(specs, make_config({**TOPK, "bucket_bytes": 8192}))) == [["w4", "w3"], ["w2", "w1"], ["w0"]]
    assert names(make_plan(specs, make_config({**TOPK, "bucket_bytes": 8191}))) == [[f"w{i}"] for i in (4, 3, 2, 1, 0)]
    assert names(make_plan(specs, make_config({**TOPK, "bucket_bytes": 0}))) == [[f"w{i}"] for i in (4, 3, 2, 1, 0)]
    assert names(make_plan(specs, make_config(TOPK))) == [["w4", "w3", "w2", "w1", "w0"]]


def test_dense_tensors_and_other_communicators_have_buckets_of_their_own():
    specs = [TensorSpec(n, (32, 32)) for n in ("a", "b", "c")] + [TensorSpec(f"{n}.bias", (32,)) for n in ("a", "b")]
    config = make_config({**TOPK, "rules": [rule("fp16", match="b")]})
    plan = make_plan(specs, config)
    # Buckets are sorted by the time at which their last gradient is ready.
    assert names(plan) == [["b.bias", "a.bias"], ["b"], ["c", "a"]]
    assert len({bucket.name for bucket in plan.buckets}) == 3


def test_devices_have_buckets_of_their_own():
    specs = [TensorSpec("a", (64, 64), device="cpu"), TensorSpec("b", (64, 64), device="cuda:0")]
    assert names(make_plan(specs, make_config(TOPK))) == [["b"], ["a"]]


def test_a_plan_is_the_same_however_often_it_is_made():
    """Each rank makes its own plan, and all plans must be equal."""
    specs = [TensorSpec(f"w{i}", (32, 32 + i)) for i in range(20)]
    assert names(make_plan(specs, make_config(TOPK))) == names(make_plan(list(specs), make_config(TOPK)))


def test_delegated_tensors_are_left_to_the_caller():
    specs = [TensorSpec("w", (64, 64)), TensorSpec("small", (16, 16))]
    plan = make_plan(specs, make_config(TOPK), delegate=lambda item: item.dense)
    assert names(plan) == [["w"]]
    assert [item.spec.name for item in plan.exchanged] == ["w"]
    assert [item.spec.name for item in plan.delegated] == ["small"]
    assert {item.spec.name for item in plan.assignments} == {"w", "small"}


def test_small_dense_vectors_beside_compressed_tensors_ride_along_in_one_collective():
    specs = [
        TensorSpec("w", (64, 64)),
        TensorSpec("w.bias", (64,)),
        TensorSpec("scale", ()),
        TensorSpec("half", (64,), "float16"),
        TensorSpec("brain", (64,), "bfloat16"),
        TensorSpec("double", (64,), "float64"),
        TensorSpec("rows", (64,), sparse=True),
        TensorSpec("small", (16, 16)),
        TensorSpec("long", (65535,)),
        TensorSpec("longer.bias", (65536,)),
    ]
    left = {"half", "rows", "small", "longer.bias"}
    for granularity in ("layer", "bucket", "model"):
        config = make_config({**TOPK, "granularity": granularity})
        plan = make_plan(specs, config, delegate=lambda item: item.dense)
        assert {item.spec.name for item in plan.delegated} == left, granularity
        assert sorted(map(sorted, names(plan))) == [["brain", "double", "long", "scale", "w.bias"], ["w"]], granularity
    # If nothing is compressed, all tensors are delegated, as without grace.
    plan = make_plan(specs, make_config(compressor="none"), delegate=lambda item: item.dense)
    assert not plan.buckets
    assert {item.spec.name for item in plan.delegated} == {spec.name for spec in specs}


def test_names_must_be_unique():
    with pytest.raises(ConfigError, match="two tensors are called 'w'"):
        make_plan([TensorSpec("w", (2,)), TensorSpec("w", (3,))], make_config(TOPK))


def test_a_name_that_is_also_that_of_a_piece_is_refused():
    specs = [TensorSpec("w", (2 * GRAIN,)), TensorSpec(f"w[0:{GRAIN}]", (GRAIN,))]
    config = {**TOPK, "default_rules": False, "split_bytes": 4 * GRAIN}
    with pytest.raises(ConfigError, match=rf"name 'w\[0:{GRAIN}\]' is also the name of a unit"):
        make_plan(specs, make_config({**config, "bucket_bytes": 1}))
    # As long as no unit has the name, the tensor may.
    plan = make_plan(specs, make_config({**config, "split_bytes": 0, "bucket_bytes": 1}))
    assert {unit.spec.name for unit in plan.units} == {spec.name for spec in specs}


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("config", [{**TOPK, "default_rules": False}, {**TOPK, "rules": [rule(match="x")]}, {}])
def test_complex_tensors_stay_dense_and_leave_the_engine_alone(dtype, config):
    specs = [TensorSpec("x", (64, 64), dtype), TensorSpec("small", (8,), dtype), TensorSpec("w", (64, 64))]
    config = make_config({"compressor": "topk", **config})
    plan = make_plan(specs, config, delegate=lambda item: item.dense)
    assert {item.spec.name: item.reason for item in plan.delegated} == dict.fromkeys(
        ("x", "small"), "complex numbers stay dense"
    )
    (row,) = [line.split() for line in plan.report().splitlines() if line.startswith("small ")]
    assert row[5] == row[6] == {"complex64": "64", "complex128": "128"}[dtype]
    with pytest.raises(ConfigError, match=f"tensor '(x|small)': gradients of dtype {dtype} cannot be exchanged here"):
        make_plan(specs, config)


def test_dtypes_that_are_no_gradients_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"'embedding'.*int64.*float32"):
        TensorSpec("embedding", (3,), "int64")


# --- report -----------------------------------------------------------------------------------------------------


def test_the_report_names_every_tensor_its_bytes_and_why_it_is_dense():
    specs = [
        TensorSpec("encoder.weight", (100, 100)),
        TensorSpec("encoder.bias", (100,)),
        TensorSpec("table", (100, 100)),
        TensorSpec("loud", (100, 100)),
        TensorSpec("scalar", ()),
    ]
    rules = [
        rule("powersgd", match="table"),
        rule("threshold", match="loud", threshold=0.01),
        rule("qsgd", match="no such tensor"),
    ]
    plan = make_plan(specs, make_config({**TOPK, "rules": rules}), delegate=lambda item: item.spec.name == "scalar")
    report = plan.report()
    lines = {line.split()[0]: line for line in report.splitlines()}
    assert {spec.name for spec in specs} <= set(lines)
    # 1 % of 10,000 elements at 8 bytes.
    assert lines["encoder.weight"].split()[1:7] == ["100x100", "topk", "residual", "allgather", "40,000", "800"]
    assert lines["encoder.bias"].split()[2:7] == ["none", "none", "allreduce", "400", "400"]
    assert "fewer than 1,024" in lines["encoder.bias"]
    # (100 + 100) * 4 values of 4 bytes, P included.
    assert lines["table"].split()[6] == "3,200"
    assert "rule 1" in lines["table"]
    assert "by data" in lines["loud"]
    assert lines["scalar"].split()[1] == "scalar"
    total = sum(bucket.nbytes for bucket in plan.buckets)
    # The scalar shares a bucket with the bias.
    assert not plan.delegated
    assert f"5 tensors as {len(plan.units)} units in {len(plan.buckets)} buckets, and 0 left to" in report
    assert f"own allreduce: 120,404 bytes dense, {total:,} on the wire" in report
    assert "plus what the data select" in report
    assert "warning: rule 3 of the configuration (match no such tensor) fits no tensor" in report


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"compressor": "topk"}, None),
        ({"compressor": "qsgd"}, None),
        ({"compressor": "none", "memory": "residual"}, None),
        ({"compressor": "onebit"}, None),
        ({"compressor": "qsgd", "memory": "residual"}, "adds them to the variance"),
        ({"compressor": "terngrad", "memory": "residual"}, "error can exceed"),
        ({"compressor": "randomk", "memory": "residual"}, None),
        ({"compressor": "randomk", "memory": "none"}, None),
        ({"compressor": "randomk", "scaled": True, "memory": "residual"}, "adds them to the variance"),
        ({"compressor": "signsgd", "memory": "residual"}, "not the mean"),
    ],
    ids=str,
)
def test_the_report_warns_of_error_feedback_that_need_not_converge(config, told):
    report = make_plan([TensorSpec("w", (64, 64))], make_config(config)).report()
    assert ("warning: memory 'residual'" in report) == (told is not None)
    assert told is None or told in report


@pytest.mark.parametrize("name", list(compressors))
def test_a_method_without_its_error_feedback_is_told_once(name):
    """A method that drops a part of the gradient needs a memory; its default memory says whether it does."""
    specs = [TensorSpec(key, (64, 64)) for key in "ab"]
    default = compressors.example(name).default_memory
    loses = bool(memories.make(default).feeds_back) and "memory" not in compressors.required(name)
    for memory, count in ((None, 0), (default, 0), ("none", int(loses))):
        named = {"memory": memory} if memory else {}
        config = make_config({"compressor": name, **compressors.required(name), **named, "granularity": "layer"})
        told = [text for text in make_plan(specs, config).warnings if "lost for good" in text]
        assert len(told) == count, memory
        assert all(f"leave 'memory' out, or set it to '{default}'" in text for text in told)
        assert [text for text in early_warnings(config) if "lost for good" in text] == told


def test_owners_of_means_that_lose_a_part_are_told():
    specs, ranks = [TensorSpec(key, (64, 64)) for key in "ab"], Ranks(3)
    for options, count in (({}, 0), ({"shard_memory": "none"}, 1), ({"shard_memory": "none", "second": "qsgd"}, 0)):
        config = make_config({"compressor": "topk", "communicator": "two_shot", **options})
        told = [text for text in make_plan(specs, config, ranks=ranks).warnings if "lost for good" in text]
        assert len(told) == count, options
        assert all("owners of means" in text and "leave 'shard_memory' out" in text for text in told)


def test_differences_lose_nothing_for_good():
    config = make_config({"compressor": "topk", "memory": "diana"})
    assert not make_plan([TensorSpec("w", (64, 64))], config).warnings


def test_every_default_rule_has_a_reason():
    assert all(r.reason.startswith("default rule: ") for r in default_rules())


def test_harm_is_told_before_the_tensors_are_known(caplog):
    """Warnings that depend only on the method come early, because a Keras optimizer gets its variables later."""
    config = make_config(
        {
            "compressor": "qsgd",
            "memory": "residual",
            "schedule": [{"step": 5, "compressor": "signum", "memory": "residual"}],
            "rules": [{"match": "w", "compressor": "terngrad", "memory": "residual"}],
        }
    )
    told = early_warnings(config)
    assert [any(word in text for text in told) for word in ("QSGD", "Signum", "TernGrad")] == [True, True, False]
    with caplog.at_level("WARNING", logger="grace"):
        grace.Simulation(1, {"w": (64, 64), "v": (64, 64)}, config)
    assert all(any(word in record.message for record in caplog.records) for word in ("QSGD", "Signum", "TernGrad"))


@pytest.mark.parametrize(
    ("config", "bytes_sent"),
    [
        # 8 bytes for each of 4,096 elements.
        ({"compressor": "topk", "compress_ratio": 0.6}, 8 * int(0.6 * 4096)),
        ({"compressor": "dgc", "compress_ratio": 0.6}, 8 * int(0.6 * 4096)),
        ({"compressor": "topk", "compress_ratio": 0.5}, None),
        ({"compressor": "dgc", "compress_ratio": 0.4}, None),
        ({"compressor": "threshold", "threshold": 0.01}, None),
        ({"compressor": "topk", "compress_ratio": 0.6, "index_coding": "bitmap"}, None),
    ],
    ids=str,
)
def test_the_report_warns_of_payloads_larger_than_the_gradient(config, bytes_sent):
    (*_, last) = make_plan([TensorSpec("w", (64, 64))], make_config(config)).report().splitlines()
    told = "sends more than the gradient has" in last
    assert told == (bytes_sent is not None)
    assert not told or f"{bytes_sent:,} instead of 16,384 bytes for 'w'" in last


@pytest.mark.parametrize("name", list(compressors))
def test_no_method_is_warned_of_its_own_memory(name):
    plan = make_plan([TensorSpec("w", (64, 64))], make_config({"compressor": name, **compressors.required(name)}))
    assert plan.warnings == ()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"compressor": "signsgd"}, "smaller learning rate"),
        ({"compressor": "signum"}, "smaller learning rate"),
        ({"compressor": "randomk", "memory": "none", "compress_ratio": 0.01}, "raise compress_ratio"),
        ({"compressor": "wangni", "compress_ratio": 0.01}, "raise compress_ratio"),
        ({"compressor": "wangni", "compress_ratio": 0.01, "variance_budget": 1.0}, None),
        ({"compressor": "randomk", "memory": "none"}, None),
        ({"compressor": "topk", "rules": [{"match": "b", "compressor": "signsgd"}]}, "smaller learning rate"),
    ],
)
def test_the_report_says_which_setting_must_change_with_a_method(config, said):
    specs = [TensorSpec("a", (64, 64)), TensorSpec("b", (64, 64))]
    notes = [line for line in make_plan(specs, make_config(config)).report().splitlines() if line.startswith("note: ")]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]
