#!/usr/bin/env python3
"""Write the handwritten digits of scikit-learn where programs without Python can read them.

    dev/export_digits.py build/demo/digits.bin

Little-endian: "DIGITS1\\0"; uint32 n_train, n_test, n_pixels; then for the train set and
after it for the test set float32 pixels (n, n_pixels) from 0 to 1 and uint8 labels (n,).
The split is that of examples/digits_ddp.py with seed 0.
"""

from __future__ import annotations

import argparse
import os
import struct
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

MAGIC = b"DIGITS1\0"
N_TEST = 360
SEED = 0


def encode() -> bytes:
    """The whole file."""
    digits = load_digits()
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(digits.target), generator=generator).numpy()
    pixels = (digits.data[order] / 16).astype("<f4")
    labels = digits.target[order].astype(np.uint8)
    parts = [MAGIC, struct.pack("<3I", len(labels) - N_TEST, N_TEST, pixels.shape[1])]
    for part in (slice(N_TEST, None), slice(None, N_TEST)):
        parts += [pixels[part].tobytes(), labels[part].tobytes()]
    return b"".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    path: Path = parser.parse_args().file
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: a reader never sees half of it.
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(encode())
    os.replace(partial, path)


if __name__ == "__main__":
    main()
