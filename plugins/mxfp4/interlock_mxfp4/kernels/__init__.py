"""Triton kernels for the B300 target, each beside its PyTorch reference in `.reference`.

Modules with kernels do not postpone annotations: Triton reads ``tl.constexpr`` from them.
"""
