"""Model files: where they come from (`resolve`), what they say (`config`) and their tensors."""
