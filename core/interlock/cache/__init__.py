"""Reference-counted cache memory: blocks of tokens, and what may be found in them."""
