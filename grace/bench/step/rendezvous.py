"""Horovod's rendezvous server for ranks that no launcher started: `python -m grace.bench.step.rendezvous HOST:1,...`.

It prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Serve the ranks on the hosts of the command line."""
    answers = os.dup(1)
    os.dup2(2, 1)
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    hosts = parse_hosts(sys.argv[1])
    server = RendezvousServer(0)
    port = server.start()
    server.init(get_host_assignments(hosts, sum(host.slots for host in hosts)))
    os.write(answers, f"{port}\n".encode())
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
