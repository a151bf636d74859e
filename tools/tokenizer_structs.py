"""Structs of the library that the tokenizer oracles pass through ctypes."""
import ctypes


class EncodeOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("special", ctypes.c_int), ("allowed", ctypes.POINTER(ctypes.c_char_p)),
                ("allowed_count", ctypes.c_size_t), ("broken", ctypes.c_int), ("frame", ctypes.c_bool)]


class Tokens(ctypes.Structure):
    _fields_ = [("ids", ctypes.POINTER(ctypes.c_int32)), ("count", ctypes.c_size_t), ("capacity", ctypes.c_size_t)]


class Strbuf(ctypes.Structure):
    _fields_ = [("data", ctypes.POINTER(ctypes.c_char)), ("length", ctypes.c_size_t), ("capacity", ctypes.c_size_t),
                ("failed", ctypes.c_bool)]
