"""The half of the sandbox that runs in bare interpreters: supervisor, fork server and the confined child.

Standard library only, single-threaded, relative imports only: these modules are loaded twice, as
``services.envgateway.sandbox.bare`` by the gateway (the wire format) and as ``bare`` by ``python -I -S``.

    gateway ──(stream socket)── supervisor ──(seqpacket socket + fds)── fork server ──fork── child
                                          limits, clean-up                        warm, holds no    confined, runs
                                          child subreaper                         request's data    one program
"""
