"""Stands in for an engine: listens on its port and ends on SIGTERM.

In vLLM's arguments ``--fail`` has it end at once, ``--refuse`` say that it cannot serve its model, ``--stubborn``
ignore SIGTERM, and ``--deaf`` listen nowhere.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--engine-id")
    options, others = parser.parse_known_args()
    if "--fail" in others:
        sys.exit(4)
    if "--refuse" in others:
        print("sluice_engine: /model: sliding_window is 4096", flush=True)
        sys.exit(7)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "--stubborn" in others else lambda *_: stop.set())
    if "--deaf" in others:
        stop.wait()
        return
    # It stays open until the process has ended: closed here, it may fail the thread that waits at it.
    listener = socket.create_server((options.host, options.port))
    print(options.engine_id, os.getpid(), "listens", flush=True)
    threading.Thread(target=answer, args=(listener, options.engine_id), daemon=True).start()
    stop.wait()
    print("ended by SIGTERM", flush=True)


def answer(listener: socket.socket, engine_id: str) -> None:
    """Says who it is to whoever connects, as an engine does in the first message of its stream."""
    while True:
        connection, _ = listener.accept()
        connection.sendall(f"{engine_id} {os.getpid()}".encode())
        connection.close()


main()
