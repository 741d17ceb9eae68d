"""A child process that answers, is silent, dies or speaks out of turn, as asked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from services.envgateway.sandbox.bare import wire


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    if "silent" in sys.argv:
        time.sleep(60)
    channel.sendall(wire.encode({"kind": "ready"}))
    frames = wire.FrameReader()
    while data := channel.recv(1 << 16):
        for question, _ in frames.feed(data):
            match question["kind"]:
                case "fork":
                    question["child"] = subprocess.Popen(["sleep", "60"]).pid
                case "crash":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "leave":
                    os._exit(3)
                case "wait":
                    time.sleep(60)
                case "twice":
                    channel.sendall(wire.encode({"kind": "unasked"}))
            channel.sendall(wire.encode(question))


main()
