"""Writes a Hugging Face folder again with the matrices of its blocks as fp8 (e4m3) with one scale
per block of rows and columns, as DeepSeek V3, Kimi K2 and the FP8 variants of Qwen3 are stored; or with
its stacked experts as MXFP4, as GPT-OSS is stored."""
import json
import math
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


def copy_with(source, target, quantization):
    """Copies a folder, with another quantization_config."""
    shutil.copytree(source, target)
    with open(os.path.join(target, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config["quantization_config"] = quantization
    with open(os.path.join(target, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)


def quantize(source, target, rows, cols):
    """Returns what the matrices of the new folder mean, as fp32: {name: values}."""
    copy_with(source, target, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, cols]})
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


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_BLOCK = 32


def quantize_fp4(source, target):
    """MXFP4: blocks of 32 inputs share a power of 2. Returns what the tensors of the new folder mean, as fp32, under the old names."""
    copy_with(source, target, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]})
    meant, out = {}, {}
    for name, (shape, values) in read_tensors(os.path.join(source, "model.safetensors")).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            meant[name] = values
            out[name] = ("F32", shape, struct.pack(f"<{len(values)}f", *values))
            continue
        experts, inputs, outputs = shape
        result, blocks, scales = list(values), bytearray(), bytearray()
        for row in range(experts * outputs):  # an output of an expert
            at = row // outputs * inputs * outputs + row % outputs
            for first in range(0, inputs, FP4_BLOCK):
                places = [at + (first + i) * outputs for i in range(FP4_BLOCK)]
                most = max(abs(values[place]) for place in places)
                exponent = math.ceil(math.log2(most / FP4[-1])) if most > 0 else 0
                codes = []
                for place in places:
                    size = abs(values[place]) / 2.0 ** exponent
                    code = min(range(8), key=lambda k, size=size: abs(FP4[k] - size))
                    codes.append(code | (8 if values[place] < 0 else 0))
                    result[place] = math.copysign(FP4[code] * 2.0 ** exponent, values[place])
                blocks += bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2]))
                scales.append(exponent + 127)
        meant[name] = result
        groups = inputs // FP4_BLOCK
        out[name + "_blocks"] = ("U8", [experts, outputs, groups, FP4_BLOCK // 2], bytes(blocks))
        out[name + "_scales"] = ("U8", [experts, outputs, groups], bytes(scales))
    write_tensors(os.path.join(target, "model.safetensors"), out)
    return meant
