"""interlock: an LLM serving engine made of a minimal core loop and plugins.

Importing this package reads nothing, sets nothing and touches no device.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
