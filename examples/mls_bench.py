"""An entry for the task `optimization-gradient-compression` of MLS-Bench, with any configuration of grace.

    entry = GradientCompressor(compress_ratio=0.01, config={"compressor": "topk"})
    tensors, ctx = entry.compress(gradient, "layer1.weight")      # what a worker sends
    gradient = entry.decompress(tensors, ctx)                     # in its shape and dtype

`benchmarks/mls_bench.py` trains a small network in this way.
"""

import torch

import grace


class GradientCompressor:
    """The compressor of one worker, which compresses each tensor by itself, as granularity "layer" does.

    `config` is a mapping as for `grace.make_config`. `compress_ratio` is for methods with this option, unless `config`
    sets it. What a method keeps between steps belongs to the name of a tensor. Random numbers follow from the seed of
    PyTorch, unless `config` has one, from the name, and from the number of calls with it. Small tensors stay dense, by
    the default rules. Raises ConfigError for what this interface does not tell: a schedule, a learning rate, a norm.
    """

    def __init__(self, compress_ratio=0.01, config=None):
        config = {"seed": torch.initial_seed() % 2**63, **(config or {"compressor": "eden"})}
        made = grace.make_config(config)
        if hasattr(made.method.compressor, "compress_ratio"):
            made = grace.make_config({"compress_ratio": compress_ratio, **config})
        needs = {need for entry in (made, *made.rules) for need in entry.method.memory.needs}
        if made.schedule or needs & {"lr", "norm"}:
            raise grace.errors.ConfigError(
                "GradientCompressor: expected a method without a schedule whose memory needs neither the learning rate "
                f"nor the norm of all gradients, received {config}; leave these options out."
            )
        self.config, self.calls, self.states = made, {}, {}

    def compress(self, tensor, name):
        """Return what the worker sends of a gradient, as a list of tensors, and the context for `decompress`."""
        step = self.calls[name] = self.calls.get(name, -1) + 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = grace.TensorSpec(name, tuple(tensor.shape), dtype, str(tensor.device))
        method = (self.config.rule_for(spec) or self.config).method
        compressor, memory = method.compressor, method.memory
        if tensor.is_complex() or compressor.unfit(spec):
            return [tensor], None
        ops = grace.get_ops("torch", spec.device)
        key = grace.Key(grace.Key.derive(self.config.seed, name), step)
        if name not in self.states:
            first = compressor.init(spec, ops, key.seed) if isinstance(compressor, grace.Stateful) else {}
            self.states[name] = memory.init(spec, ops), first
        held, own = self.states[name]
        at = grace.Site(ops, spec, key, state=own)
        x, held, _ = memory.compensate(ops.cast(tensor.detach().reshape(-1), spec.work_dtype), held, at)
        if not ops.finite(x):
            # Nothing may keep NaN or infinity; the optimizer sees them, as in a run.
            return [tensor], None
        at, negotiated = at._replace(memory=held), []
        if isinstance(compressor, grace.Negotiating) and compressor.proposed(spec):
            # With several workers, what they negotiate travels as well.
            negotiated = [compressor.propose(x, at).array]
            at = at._replace(negotiated=negotiated[0])
        payload = compressor.compress(x, at)
        self.states[name] = memory.update(x, payload, compressor, held, at), own
        sent = [payload.pop(field.name) for field in compressor.wire(spec) if field.wire]
        return [*sent, *negotiated], (method, at, payload)

    def decompress(self, tensors, ctx):
        """Return the gradient in its shape and dtype, and let the method learn from it."""
        if ctx is None:
            return tensors[0]
        method, at, unsent = ctx
        compressor, memory, (held, own) = method.compressor, method.memory, self.states[at.spec.name]
        names = [field.name for field in compressor.wire(at.spec) if field.wire]
        payload = {**unsent, **dict(zip(names, tensors, strict=False))}
        gradient = compressor.merge([payload], at)
        if memory.gain != 1:
            gradient = at.ops.scale_(gradient, memory.gain)
        if "mean" in memory.needs:
            gradient, held = memory.finish(gradient, held, at)
        if isinstance(compressor, grace.Learning):
            own = compressor.learn([payload], at)
        elif isinstance(compressor, grace.Tuning) and (tally := compressor.tally([payload], at)):
            own = compressor.retune(own, *tally, at)
        self.states[at.spec.name] = held, own
        return at.ops.reshape(at.ops.cast(gradient, at.spec.dtype), at.spec.shape)
