#!/usr/bin/env python3
"""Prints what tests/unit/base/test_base_fp8.c expects of fp8 conversions: for each format a hash of
PyTorch's codes of all bf16 values within the format. Needs PyTorch."""
import torch

FORMATS = {'QD_F8E4M3': (torch.float8_e4m3fn, 448.0), 'QD_F8E5M2': (torch.float8_e5m2, 57344.0)}


def main():
    patterns = torch.arange(0x10000, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    for name, (dtype, largest) in FORMATS.items():
        codes = patterns[patterns.abs() <= largest].to(dtype).view(torch.uint8)
        value = 14695981039346656037
        for code in codes.tolist():
            value = (value ^ code) * 1099511628211 % 2**64
        print(f'{name}  0x{value:016x}')


if __name__ == '__main__':
    main()
