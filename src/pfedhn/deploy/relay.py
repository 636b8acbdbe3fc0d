"""What Flower starts for every message at a party: it carries the bytes to the party's own process and back.

It knows nothing: neither PyTorch nor the data nor a key is loaded here.
"""

import socket
import struct

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

SECONDS_TO_CONNECT = 10.0
LENGTH = struct.Struct("<Q")
PART, CONTENT = "message", "content"  # names of the record that carries bytes, and of its field

app = ClientApp()


def carried(content: bytes) -> RecordDict:
    """Bytes as Flower takes them. One record: each object costs time."""
    return RecordDict({PART: ConfigRecord({CONTENT: content})})


def content_of(message: Message) -> bytes:
    content = message.content[PART][CONTENT]
    assert isinstance(content, bytes)
    return content


def write_message(stream: socket.socket, content: bytes) -> None:
    stream.sendall(LENGTH.pack(len(content)) + content)


def read_message(stream: socket.socket) -> bytes:
    """What the other side wrote; an error if it stops in the middle."""
    with stream.makefile("rb") as file:
        head = file.read(LENGTH.size)
        if len(head) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            if len(content := file.read(length)) == length:
                return content
    raise ConnectionError("the party's own process has gone")


def relay(message: Message, context: Context) -> Message:
    """Ask the party's own process, which waits at a socket that only its owner can open.

    In a simulation there is no such process: the party answers here.
    """
    if "socket" not in context.node_config:
        from pfedhn.deploy.simulated import answer as of_party  # PyTorch and all

        return Message(carried(of_party(content_of(message), context)), reply_to=message)
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(SECONDS_TO_CONNECT)
        stream.connect(str(context.node_config["socket"]))
        stream.settimeout(None)
        write_message(stream, content_of(message))
        answer = read_message(stream)
    return Message(carried(answer), reply_to=message)


app.query()(relay)
app.train()(relay)
app.evaluate()(relay)
