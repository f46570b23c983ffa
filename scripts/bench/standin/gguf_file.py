"""The parts of GGUF that make.py needs: Q4_0 and Q8_0 blocks in NumPy, reading and writing
files."""
import math
import struct

import numpy as np

F32, Q4_0, Q8_0 = 0, 2, 8
# Type -> values and bytes of a block.
BLOCK = {F32: (1, 4), Q4_0: (32, 18), Q8_0: (32, 34)}
ALIGN = 32
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
}


def size(kind, shape):
    """Returns the bytes of a tensor. `shape` is rows first, as everywhere here; the file has the
    reverse order."""
    values, held = BLOCK[kind]
    return math.prod(shape) // values * held


def q4_0(x):
    """Rounds rows of f32 to rows of blocks. The largest value of a block becomes -8."""
    b = x.reshape(x.shape[0], -1, 32)
    top = np.take_along_axis(b, np.abs(b).argmax(-1)[..., None], -1)
    d = (top / -8).astype(np.float16)
    inverse = np.divide(1, d.astype(np.float32), where=d != 0, out=np.zeros_like(top))
    codes = np.clip(np.round(b * inverse) + 8, 0, 15).astype(np.uint8)
    return np.concatenate([d.view(np.uint8), codes[..., :16] | codes[..., 16:] << 4], -1)


def q8_0(x):
    b = x.reshape(x.shape[0], -1, 32)
    d = (np.abs(b).max(-1, keepdims=True) / 127).astype(np.float16)
    inverse = np.divide(1, d.astype(np.float32), where=d != 0, out=np.zeros_like(d, np.float32))
    codes = np.clip(np.round(b * inverse), -127, 127).astype(np.int8)
    return np.concatenate([d.view(np.uint8), codes.view(np.uint8)], -1)


def text(s):
    s = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(s)) + s


class Key:
    """A metadata value as it is in the file."""

    def __init__(self, kind, raw):
        self.kind, self.raw = kind, raw

    @staticmethod
    def u32(n):
        return Key(4, struct.pack("<I", n))

    @staticmethod
    def f32(x):
        return Key(6, struct.pack("<f", x))

    @staticmethod
    def bool(b):
        return Key(7, struct.pack("<?", b))

    @staticmethod
    def text(s):
        return Key(8, text(s))

    @staticmethod
    def array(kind, values):
        body = b"".join(map(text, values)) if kind == 8 else struct.pack(
            f"<{len(values)}{SCALARS[kind]}", *values
        )
        return Key(9, struct.pack("<IQ", kind, len(values)) + body)

    def number(self):
        return struct.unpack("<" + SCALARS[self.kind], self.raw)[0]


def header(keys, tensors):
    """Returns the header and the offset of each tensor. `tensors`: name -> (type, shape)."""
    out, at, offsets = [], 0, {}
    for name, (kind, shape) in tensors.items():
        out.append(text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q",
            n) for n in reversed(shape)))
        out.append(struct.pack("<IQ", kind, at))
        offsets[name] = at
        at += -(-size(kind, shape) // ALIGN) * ALIGN
    meta = [text(name) + struct.pack("<I", key.kind) + key.raw for name, key in keys.items()]
    head = b"GGUF" + struct.pack(
        "<IQQ", 3, len(tensors), len(keys)
    ) + b"".join(meta) + b"".join(out)
    head += b"\0" * (-len(head) % ALIGN)
    return head, {name: len(head) + at for name, at in offsets.items()}, len(head) + at


def read(path):
    """Reads metadata and tensors (name -> type, shape, bytes as a memory map) of a file with the
    types above."""
    data = np.memmap(path, np.uint8, "r")
    at = 24

    def take(form):
        nonlocal at
        value = struct.unpack_from("<" + form, data, at)[0]
        at += struct.calcsize("<" + form)
        return value

    def string():
        nonlocal at
        n = take("Q")
        at += n
        return bytes(data[at - n : at])

    def skip(kind):
        nonlocal at
        if kind == 8:
            string()
        elif kind == 9:
            inner, n = take("I"), take("Q")
            if inner in SCALARS:
                at += n * struct.calcsize("<" + SCALARS[inner])
            else:
                for _ in range(n):
                    skip(inner)
        else:
            take(SCALARS[kind])

    if bytes(data[:4]) != b"GGUF":
        raise SystemExit(f"{path} is no GGUF file")
    count, entries = struct.unpack_from("<QQ", data, 8)
    keys, tensors = {}, {}
    for _ in range(entries):
        name, kind = string().decode(), take("I")
        start = at
        skip(kind)
        keys[name] = Key(kind, bytes(data[start:at]))
    for _ in range(count):
        name = string().decode()
        shape = [take("Q") for _ in range(take("I"))][::-1]
        tensors[name] = (take("I"), shape, take("Q"))
    at += -at % ALIGN
    return keys, {n: (k, s, data[at + o : at + o + size(k, s)]) for n, (k, s, o) in tensors.items()}
