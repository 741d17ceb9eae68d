"""An MCP server without a package: starts in milliseconds and misbehaves as asked. Its tools:

count()          how often this session has called it: a state
echo(text)       the text
big(chars)       so many characters
slow(s)          answers after so many seconds, and other requests meanwhile
hang()           answers nothing from now on
die()            ends the process
refuse()         a protocol error about the arguments
broken()         a result that is none

Arguments: ``--log FILE`` appends the pid at the start; ``--schema JSON`` is the schema of ``echo``; ``--say TEXT`` is written to
standard output first, ``--fail TEXT`` to standard error before an end with code 3; ``--mute`` answers nothing.
"""

import argparse
import json
import os
import sys
import threading
import time

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NUMBER = {"type": "object", "properties": {"number": {"type": "number"}}, "required": ["number"]}
NOTHING = {"type": "object", "properties": {}}
SCHEMAS = {"count": NOTHING, "echo": TEXT, "big": NUMBER, "slow": NUMBER, "hang": NOTHING, "die": NOTHING,
           "refuse": NOTHING, "broken": NOTHING}  # fmt: skip

lock = threading.Lock()
calls = 0


def send(message):
    with lock:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def text(request, said):
    send({"id": request["id"], "result": {"content": [{"type": "text", "text": said}]}})


def later(request, seconds):
    time.sleep(seconds)
    text(request, "at last")


def call(request):
    global calls
    name, arguments = request["params"]["name"], request["params"].get("arguments") or {}
    if name == "count":
        calls += 1
        text(request, str(calls))
    elif name == "echo":
        text(request, arguments["text"])
    elif name == "big":
        text(request, "x" * int(arguments["number"]))
    elif name == "slow":
        threading.Thread(target=later, args=(request, arguments["number"]), daemon=True).start()
    elif name == "hang":
        time.sleep(3600)
    elif name == "die":
        os._exit(9)
    elif name == "refuse":
        send({"id": request["id"], "error": {"code": -32602, "message": "no such month"}})
    else:
        send({"id": request["id"], "result": {"content": "?"}})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--log")
    parser.add_argument("--schema")
    parser.add_argument("--say")
    parser.add_argument("--fail")
    parser.add_argument("--mute", action="store_true")
    given = parser.parse_args()
    if given.log:
        with open(given.log, "a") as log:
            log.write(f"{os.getpid()}\n")
    if given.say:
        sys.stdout.write(given.say + "\n")
    if given.fail:
        sys.exit(f"{given.fail}")
    if given.schema:
        SCHEMAS["echo"] = json.loads(given.schema)
    tools = [{"name": name, "description": f"{name} it", "inputSchema": schema} for name, schema in SCHEMAS.items()]
    server = {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "raw", "version": "1"},
    }
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request or given.mute:
            continue
        if request["method"] == "initialize":
            send({"id": request["id"], "result": server})
        elif request["method"] == "tools/list":
            send({"id": request["id"], "result": {"tools": tools}})
        elif request["method"] == "tools/call":
            call(request)
        else:
            send({"id": request["id"], "error": {"code": -32601, "message": "no such method"}})


if __name__ == "__main__":
    main()
