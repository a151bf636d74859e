"""Writes a Hugging Face folder again with the matrices of its blocks as fp8 (e4m3) with one scale
per block of rows and columns, as DeepSeek V3, Kimi K2 and the FP8 variants of Qwen3 are stored."""
import json
import os
import shutil
import struct


def e4m3_values():
    """The value of each of the 256 bytes; None: not a number."""
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        value = mantissa * 2.0 ** -9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(None if byte & 127 == 127 else -value if byte & 128 else value)
    return values


VALUES = e4m3_values()
POSITIVE = VALUES[:127]


def nearest(value):
    """The byte whose value is nearest."""
    size = min(abs(value), POSITIVE[-1])
    low, high = 0, 126
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if POSITIVE[middle] <= size else (low, middle)
    byte = low if size - POSITIVE[low] <= POSITIVE[high] - size else high
    return byte | (128 if value < 0 else 0)


def single(value):
    """Rounded to fp32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def read_tensors(path):
    """name: (shape, list of fp32 values)"""
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        header, data = json.loads(file.read(length)), file.read()
    header.pop("__metadata__", None)
    return {name: (t["shape"], list(struct.unpack(f"<{(t['data_offsets'][1] - t['data_offsets'][0]) // 4}f",
                                                  data[t["data_offsets"][0]:t["data_offsets"][1]]))) for name, t in header.items()}


def write_tensors(path, tensors):
    """tensors: name: (dtype, shape, bytes)"""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def quantize(source, target, rows, cols):
    """Returns what the matrices of the new folder mean, as fp32: {name: values}."""
    shutil.copytree(source, target)
    with open(os.path.join(target, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, cols]}
    with open(os.path.join(target, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    meant, out = {}, {}
    for name, (shape, values) in read_tensors(os.path.join(source, "model.safetensors")).items():
        if len(shape) != 2 or ".layers." not in name or "mlp.gate.weight" in name:
            meant[name] = values
            out[name] = ("F32", shape, struct.pack(f"<{len(values)}f", *values))
            continue
        down, across = -(-shape[0] // rows), -(-shape[1] // cols)
        scales = [1e-12] * (down * across)
        for i, value in enumerate(values):
            block = i // shape[1] // rows * across + i % shape[1] // cols
            scales[block] = max(scales[block], abs(value) / 448.0)
        scales = [single(scale) for scale in scales]
        of = [i // shape[1] // rows * across + i % shape[1] // cols for i in range(len(values))]
        data = bytes(nearest(value / scales[of[i]]) for i, value in enumerate(values))
        meant[name] = [single(VALUES[byte] * scales[of[i]]) for i, byte in enumerate(data)]
        out[name] = ("F8_E4M3", shape, data)
        out[name + "_scale_inv"] = ("F32", [down, across], struct.pack(f"<{len(scales)}f", *scales))
    write_tensors(os.path.join(target, "model.safetensors"), out)
    return meant
