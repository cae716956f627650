"""The timeline of a registered model in a single process, as `grace what-if --trace` reads it."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import grace.torch  # noqa: E402
from grace.cli import main  # noqa: E402

pytestmark = pytest.mark.usefixtures("alone")


def traced(wrap, compressor, path):
    """Train for two steps, and return the arguments with which `grace what-if` reads the timeline."""
    model = wrap(torch.nn.Sequential(torch.nn.Linear(500, 300), torch.nn.Linear(300, 100)))
    exchange = grace.torch.register(model, {"compressor": compressor, "bucket_bytes": 100_000})
    exchange.start_timeline(path)
    for _ in range(2):
        model(torch.ones(2, 500)).sum().backward()
    return ["what-if", "--trace", str(path), "--compute", "10ms", "--ranks", "2", "--compressors", "fp16"]


@pytest.mark.parametrize("compressor", ["fp16", "topk"])
@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.parallel.DistributedDataParallel], ids=["plain", "ddp"])
def test_a_timeline_with_any_compressor_has_the_sizes_of_gradients(wrap, compressor, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GRACE_CACHE", str(tmp_path))
    found = tmp_path / "found.json"
    assert main([*traced(wrap, compressor, tmp_path / "trace.json"), "--json", str(found)]) == 0
    # 500 x 300 + 300 + 300 x 100 + 100.
    assert json.loads(found.read_text())["parameters"] == 180_400
    assert "0.2 M parameters" in capsys.readouterr().out


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.parallel.DistributedDataParallel], ids=["plain", "ddp"])
def test_a_timeline_without_compression_says_what_to_record(wrap, tmp_path, capsys):
    assert main(traced(wrap, "none", tmp_path / "trace.json")) == 2
    assert "record a step with a compressor, such as fp16" in capsys.readouterr().err
