"""Builds about 178 MB of Python objects and hashes everything it built, twice.

The digest printed depends only on the scale, so a run under memfold can be
compared with an unlimited one.  Usage: objects.py [SCALE], 1.0 by default.
"""

import hashlib
import random
import sys
import time

WORDS = (
    "page fault swap table cluster slot zspage object class reclaim cold warm "
    "anonymous resident limit pool tier gather refault shadow entry stage move"
).split()


def mix(number):
    """A 64-bit scramble (the finaliser of SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


def build(count):
    """The kinds of object programs keep: a dict of strings, a list of bytes, lists of numbers."""
    phrase = " ".join(WORDS)
    noise = random.Random(count)
    texts, blobs, numbers = {}, [], []
    for index in range(count):
        seed = mix(index)
        word = WORDS[seed % len(WORDS)]
        start = (seed >> 8) % 80
        texts[f"{word}-{index:07d}"] = f"{phrase[start:]} {seed:016x} {phrase[:start + 60]}"
        blobs.append(noise.randbytes(60 + seed % 120) + phrase.encode()[: 60 + start])
        if index % 16 == 0:
            numbers.append([])
        numbers[-1].append(seed >> 13)
    return texts, blobs, numbers


def digest(built):
    """One hash over every object, in the order in which they were made."""
    texts, blobs, numbers = built
    state = hashlib.blake2b(digest_size=16)
    for (key, text), blob in zip(texts.items(), blobs):
        state.update(key.encode())
        state.update(text.encode())
        state.update(blob)
    for row in numbers:
        state.update(repr(row).encode())
    return state.hexdigest()


def main():
    scale = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    started = time.monotonic()
    objects = build(int(234_000 * scale))
    built = time.monotonic()
    first = digest(objects)
    second = digest(objects)
    hashed = time.monotonic()
    print(f"build {built - started:.3f} s, hash twice {hashed - built:.3f} s", file=sys.stderr)
    if first != second:
        print(f"MISMATCH first {first} second {second}")
        sys.exit(1)
    print(f"digest {first} texts {len(objects[0])}")


if __name__ == "__main__":
    main()
