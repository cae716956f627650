"""Refusals of the TensorFlow adapter, and errors for ranks that differ, in real processes."""

from __future__ import annotations

import pytest

from grace.core.wire.layout import WIRE_FORMAT
from tests.support.cases import TENSORFLOW_MPI
from tests.support.launch import TENSORFLOW, TORCH, Launch
from tests.support.ranks import on, same, scenario

pytestmark = pytest.mark.distributed

TWO = Launch(TENSORFLOW, "horovodrun-gloo", 2)
each_launcher = on(TWO, TENSORFLOW_MPI)


@on(TWO)
def test_arguments_that_cannot_be_honoured_are_refused_by_name(launch):
    ranks = scenario("refused_arguments", launch)
    assert same(ranks)
    result = ranks[0]
    for name in ("compression", "groups", "num_groups", "use_locking", "device_dense", "device_sparse"):
        assert f"the argument '{name}'" in result[name]
    for name, words in {
        "second gradients": "needs a second gradient of the same batch at other weights, and no step here takes one",
        "tape, second gradients": "needs a second gradient of the same batch at other weights, and no step here takes",
        "op": "'op' must be hvd.Average or hvd.Sum",
        "predivided sum": "must be a positive number and needs op=hvd.Average",
        "no factor": "must be a positive number and needs op=hvd.Average",
        "typo": "Did you mean 'compress_ratio'?",
        "typo of an argument": "there is no argument 'sparse_as_dens'. Did you mean 'sparse_as_dense'?",
        "unknown argument": "Did you mean 'backward_passes_per_step'?",
        "tape, typo of an argument": "Did you mean 'sparse_as_dense'?",
        "exchange, typo of an argument": "Did you mean 'gradient_predivide_factor'?",
        "no passes": "must be at least 1, received 0",
        "passes twice": "gradient_accumulation_steps, but it is already 2",
        "passes too late": "wrap the optimizer before it is built",
        "wrapped": "already wrapped",
        "wrapped inside": "already wrapped",
        "version 1": "TypeError: grace.tensorflow.DistributedOptimizer: GradientDescentOptimizer is a TensorFlow 1 opt",
        "not an optimizer": "received Sequential from module keras",
        "process set": "is not registered with Horovod",
        "tape, compression": "the argument 'compression'",
        "tape, op": "'op' must be hvd.Average or hvd.Sum",
        "tape, typo": "Did you mean 'compress_ratio'?",
        "tape, twice": "received an Exchange and further arguments",
    }.items():
        assert words in result[name], name


@on(TWO)
def test_poor_pairs_are_told_by_the_first_rank(launch):
    first, second = scenario("poor_pairs", launch)
    assert [len(told) for told in first.values()] == [1, 2, 1, 0, 0]
    assert first["sgd"][0].startswith("GraceWarning: the optimizer has momentum 0.5, and so has DGCMemory(momentum=0.9")
    assert "the optimizer has momentum 0.9" in first["adam"][0]
    assert "AdamW trains badly with gradients from TopK" in first["adam"][1]
    assert not any(second.values())


@on(TWO)
def test_steps_that_cannot_be_taken_are_refused(launch):
    ranks = scenario("refused_steps", launch)
    assert same(ranks)
    for name, words in {
        "fewer gradients": "expected one gradient per variable, received 2 gradients for 4 variables",
        "float8": "overwritten by their gradients",
        "late": "had none on any rank in the first step",
        "around": "Around.apply() did not call Keras' _clip_gradients()",
    }.items():
        assert words in ranks[0][name], name


@each_launcher
def test_xla_is_refused_on_all_ranks(launch):
    ranks = scenario("compiled_by_xla", launch)
    for number, rank in enumerate(ranks):
        assert rank["everywhere"].startswith("ConfigError: XLA cannot compile")
        assert "ConfigError: XLA cannot compile" in rank["tf.function"]
        told = (
            "ConfigError"
            if number == len(ranks) - 1
            else f"MismatchError: the first step failed on rank {len(ranks) - 1}"
        )
        assert rank["on one rank"].startswith(told)
        assert "jit_compile=False" in rank["on one rank"]
        assert rank["nowhere"] == ""


@each_launcher
def test_ranks_that_differ_are_told_on_all_of_them(launch):
    for rank in scenario("different_ranks", launch):
        for name, words in {
            "configuration": "compress_ratio is 0.5 and 0.25",
            "wire format": f"wire format is 0 and {WIRE_FORMAT}",
            "payload format": "payload format, signsgd is 2 and 1",
            "argument": "sparse_as_dense is True and False",
            "typo": "unknown compressor 'topkk'. Did you mean 'topk'?",
            "optimizer": "received Sequential",
            "variables": "net/hidden/kernel exists only on rank 0",
            "kind of gradient": "'net/out/kernel' is dense on some ranks and rows of int32 on others",
            "number of gradients": "expected 4 gradients, one per variable, received 3",
            "tape": "is 'qsgd' and 'topk'",
        }.items():
            assert words in rank[name], name
        assert rank["densified"] == rank["afterwards"] == ""


@on(TWO)
def test_one_function_wraps_optimizers_of_keras(launch):
    ranks = scenario("dispatch", launch)
    assert same(ranks)
    result = ranks[0]
    for name, kind in {"keras": "DistributedSGD", "own": "DistributedOwn", "scaled": "LossScaleOptimizer"}.items():
        assert result[name][0] == kind
        assert result[name][1].startswith("topk")
    assert "is a TensorFlow 1 optimizer" in result["version 1"]
    assert result["model"].startswith("TypeError: grace.tensorflow")
    assert "torch.optim.Optimizer or a keras.optimizers.Optimizer" in result["object"]


@on(Launch(TORCH, "python", 1))
def test_one_function_wraps_optimizers_of_pytorch(launch):
    # In another process, because Horovod cannot serve two frameworks in one.
    assert scenario("dispatch", launch) == [[True, True]]
