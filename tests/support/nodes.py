"""Nodes on which a launcher may have started the ranks, and what a rank must then know of them."""

from __future__ import annotations

from typing import Any

# The node of each rank as a letter, and the ranks on each node that every rank must find: 0 if it cannot know. By what
# Horovod and torchrun tell, a rank sees only whether its own number fits.
FOUND: dict[int, dict[str, list[int]]] = {
    2: {"aa": [2, 2], "ab": [1, 1], "ba": [0, 0]},
    4: {"aaaa": [4] * 4, "aabb": [2] * 4, "abcd": [1] * 4, "abab": [2, 0, 0, 2], "aaab": [3, 3, 3, 0]},
}
UNKNOWN = "ConfigError: communicator hierarchical: the number of ranks on a node is unknown for these {} ranks. "
UNEQUAL = "ConfigError: communicator hierarchical: expected equally many ranks on every node, received {} ranks with 3 "


def told(nodes: str, rank: int) -> tuple[int, int, int]:
    """Return what a launcher tells a rank: its node, its number on the node, and how many ranks the node has."""
    mine = nodes[rank]
    return sorted(set(nodes)).index(mine), nodes[:rank].count(mine), nodes.count(mine)


def check(ranks: list[Any], together: bool) -> None:
    """Check what all ranks of a scenario found, by the nodes, and the errors of an exchange over these nodes.

    With `together`, a rank that cannot take part tells the others.
    """
    size = len(ranks)
    for nodes, expected in FOUND[size].items():
        assert [rank[nodes]["local_size"] for rank in ranks] == expected, nodes
        wrong = [local_size for local_size in expected if local_size in (0, 3)]
        for rank, local_size in zip(ranks, expected, strict=True):
            error = rank[nodes]["error"]
            if local_size in (0, 3):
                assert error.startswith((UNEQUAL if local_size else UNKNOWN).format(size)), (nodes, error)
            elif wrong and together:
                assert error.startswith("MismatchError: "), (nodes, error)
                assert UNKNOWN.format(size) in error, (nodes, error)
            else:
                assert error == "", (nodes, error)
