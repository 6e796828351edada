"""Triton kernels: what plain torch does in several passes over memory, in one.

Each is named after the plain reference that it equals bit for bit, but for sums of
gradients, and is taken for tensors on a CUDA device. Where Triton cannot be imported, or cannot compile for the
device, the reference is taken there too, with a warning once for each device and
type of floats.
"""

__all__: list[str] = []
