"""C kernels for x86-64 (AVX-512, AVX2) and aarch64 (NEON), how they are built, and how Python calls them.

Others import:
    binding  `find` and `Kernels`: the kernels for this machine

`build` compiles the sources; `make kernels` and the hook of the package's build run it.
"""
