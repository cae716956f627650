"""Horovod's rendezvous server for ranks that no launcher started. Its arguments are an address and HOST:SLOTS,...

It prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import os
import sys
import threading


def main() -> None:
    """Serve the ranks on the hosts, at the address, of the command line."""
    answers = os.dup(1)
    os.dup2(2, 1)
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    address, hosts = sys.argv[1], parse_hosts(sys.argv[2])
    # Horovod's class RendezvousServer would make this server listen on all interfaces of the machine.
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, False)
    server.init(get_host_assignments(hosts, sum(host.slots for host in hosts)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.write(answers, f"{server.server_port}\n".encode())
    sys.stdin.read()
    server.shutdown()
