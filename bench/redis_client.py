"""A small pipelining Redis client: fills a server and reads every key back.

Values are repeated phrases with a part that differs from key to key; a page of
them compresses about 2.2:1 with lz4.  redis-benchmark would fill with one
repeated letter, which compresses to nothing and says little about real data.
"""

import hashlib
import random
import socket

PHRASE = (
    b"session user account profile created updated expires region language "
    b"product category price quantity discount shipping address order status "
)
BATCH = 500


def value(index, length):
    """The value of key `index`: `length` bytes, the same in every run."""
    generator = random.Random(index)
    parts = []
    size = 0
    while size < length:
        start = generator.randrange(len(PHRASE) - 40)
        parts.append(PHRASE[start : start + generator.randrange(16, 40)])
        parts.append(b'"%x",' % generator.getrandbits(40))
        size += len(parts[-2]) + len(parts[-1])
    return b"".join(parts)[:length]


def key(index):
    """The name redis-benchmark gives to key `index`."""
    return b"key:%012d" % index


class Client:
    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.file = self.socket.makefile("rb")

    def close(self):
        self.file.close()
        self.socket.close()

    @staticmethod
    def encode(*words):
        parts = [b"*%d\r\n" % len(words)]
        for word in words:
            parts.append(b"$%d\r\n%s\r\n" % (len(word), word))
        return b"".join(parts)

    def reply(self):
        line = self.file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            length = int(rest)
            return None if length < 0 else self.file.read(length + 2)[:-2]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        return rest

    def command(self, *words):
        self.socket.sendall(self.encode(*words))
        return self.reply()

    def pipeline(self, commands):
        self.socket.sendall(b"".join(self.encode(*words) for words in commands))
        return [self.reply() for _ in commands]

    def fill(self, values):
        for first in range(0, len(values), BATCH):
            batch = range(first, min(first + BATCH, len(values)))
            self.pipeline([(b"SET", key(index), values[index]) for index in batch])

    def verify(self, values):
        """Reads every key back; returns how many are not what was stored."""
        wrong = 0
        for first in range(0, len(values), BATCH):
            batch = range(first, min(first + BATCH, len(values)))
            replies = self.pipeline([(b"GET", key(index)) for index in batch])
            wrong += sum(reply != values[index] for index, reply in zip(batch, replies))
        return wrong


def digest(values):
    state = hashlib.blake2b(digest_size=16)
    for one in values:
        state.update(one)
    return state.hexdigest()
