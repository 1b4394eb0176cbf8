"""The compression of gradients."""

from paceline.horovod.compression import Compression, Compressor

NoneCompressor, FP16Compressor = Compression.none, Compression.fp16

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
