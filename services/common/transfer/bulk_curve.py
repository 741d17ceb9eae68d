"""CURVE for the bulk plane: keys as 32 bytes, as they travel, and sockets that use them."""

from __future__ import annotations

import zmq

from services.common.errors import InfrastructureError
from services.common.transfer.zmq_loop import Socket

KEY_BYTES = 32
HANDSHAKE_BYTES = 1024  # ZeroMQ's limit on messages also holds for those of the handshake, some 500 bytes each
OVERHEAD_BYTES = 64  # of an encrypted frame


def new_keys() -> tuple[bytes, bytes]:
    """A public and a secret key. Raises ``InfrastructureError`` where ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise InfrastructureError(
            "this ZeroMQ knows no CURVE, which a run with keys needs: install the wheel of pyzmq, or leave bulk out of "
            "policies.<name>.weights.transports"
        )
    public, secret = zmq.curve_keypair()  # as text, in Z85
    return _bytes(public), _bytes(secret)


def speak_to(socket: Socket, server_key: bytes) -> None:
    """Make a client's socket speak to the holder of this key and nobody else, as a client that nobody has met before."""
    public, secret = new_keys()
    socket.curve_serverkey = server_key
    socket.curve_publickey = public
    socket.curve_secretkey = secret


def _bytes(text: bytes) -> bytes:
    from zmq.utils import z85

    return z85.decode(text)
