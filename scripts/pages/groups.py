"""Tables that group the methods: by their default memory, and by how they train under Adam."""

from __future__ import annotations

from registry import Block, kind, row

from grace.core.config.registry import compressors, memories


@kind("memory-defaults")
def memory_defaults(block: Block) -> list[str]:
    """Return which memory is the default of which methods."""
    methods: dict[str, list[str]] = {name: [] for name in memories}
    for name, compressor in compressors.ready():
        if "memory" not in compressors.required(name):
            methods[compressor.default_memory].append(f"`{name}`")
    lines = [row("memory", "default of"), row("---", "---")]
    return lines + [row(f"`{memory}`", ", ".join(names)) for memory, names in methods.items() if names]


@kind("adam-verdicts")
def adam_verdicts(block: Block) -> list[str]:
    """Return which methods are known to train well under Adam, and which badly."""
    methods: dict[str, list[str]] = {"well": [], "badly": [], "not known": []}
    for name, _ in compressors.ready():
        adam = compressors.about(name).adam
        methods["not known" if adam is None else "well" if adam else "badly"].append(f"`{name}`")
    lines = [row("with Adam", "methods"), row("---", "---")]
    return lines + [row(title, ", ".join(names)) for title, names in methods.items() if names]
