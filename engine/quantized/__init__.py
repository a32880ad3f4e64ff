"""Quantized checkpoints: what their config says, and each format's tensors read into `kernels.grouped` without loss."""
