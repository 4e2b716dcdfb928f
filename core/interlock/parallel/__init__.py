"""Tensor parallelism: who holds which part of a weight, and how ranks start, talk and end."""
