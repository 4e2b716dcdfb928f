"""The plugin's Triton kernel: KDA prefill that leaves states behind on its way."""
