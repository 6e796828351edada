"""The code that a CUDA device would run, made without one."""

import itertools

from speechbrain_rev.kernels import fixed_point as kernels

#: What is added, to what, where magnitudes are noted, and how many elements there are.
KINDS = [
    *itertools.product(
        ("*fp32", "*bf16", "*fp16"), ("*i32", None), ("*u32", None), ("i32",)
    ),
    ("*fp32", "*i32", "*u32", "i64"),
    ("*fp32", "*i32", "*u32", 1),
]


def compiled(capability):
    """Compile the kernel for all kinds of arguments; return it as PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernels._compiled(kernels._add_kernel)
    code = []
    for f, value, largest, size in KINDS:
        subtract = largest is None
        constants = {"STEPS": 2.0**20, "SUBTRACT": subtract, "BLOCK": kernels.BLOCK}
        arguments = {"value": value, "f": f, "out": "*i32", "largest": largest}
        arguments |= {"size": size}
        # Of no tensor and of one element Triton makes constants.
        constants |= {n: x for n, x in arguments.items() if x is None or x == 1}
        signature = {
            name: "constexpr" if name in constants else arguments[name]
            for name in kernel.arg_names
        }
        source = ASTSource(kernel, signature, constants)
        target = GPUTarget("cuda", capability, 32)
        code.append(triton.compile(source, target=target).asm["ptx"])
    return code
