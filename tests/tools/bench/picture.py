"""Pixels of a PNG as a browser writes it: 8 bits a channel, not interlaced.

Source: Portable Network Graphics specification, third edition, sections 9 (filters) and 11.2 (IHDR, IDAT).
"""

import zlib
from pathlib import Path

import numpy as np


def read_png(path: Path) -> np.ndarray:
    """[height, width, 3], uint8."""
    data = path.read_bytes()
    width, height = (int.from_bytes(data[i : i + 4]) for i in (16, 20))
    channels = {2: 3, 6: 4}[data[25]]
    packed, at = b"", 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += size + 12
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    image = np.zeros((height, width, channels), np.uint8)
    above = np.zeros((width, channels), np.int32)
    for y in range(height):
        above = _unfiltered(int(lines[y, 0]), lines[y, 1:].reshape(width, channels).astype(np.int32), above)
        image[y] = above
    return image[..., :3]


def _unfiltered(kind: int, line: np.ndarray, above: np.ndarray) -> np.ndarray:
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line, 0) & 255
    if kind == 2:
        return (line + above) & 255
    out, left, corner = line.tolist(), [0] * line.shape[1], [0] * line.shape[1]
    for pixel, up in zip(out, above.tolist(), strict=True):
        for c, value in enumerate(pixel):
            if kind == 3:
                guess = (left[c] + up[c]) // 2
            else:
                p = left[c] + up[c] - corner[c]
                guess = min(
                    (abs(p - left[c]), 0, left[c]), (abs(p - up[c]), 1, up[c]), (abs(p - corner[c]), 2, corner[c])
                )[2]
            pixel[c] = (value + guess) & 255
        left, corner = pixel, up
    return np.asarray(out, np.int32)
