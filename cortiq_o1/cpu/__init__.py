"""The operator on NumPy: twins of the kernels, and an engine that runs plans through them."""
