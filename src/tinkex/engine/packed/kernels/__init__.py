"""C kernels for x86-64 and their binding."""
