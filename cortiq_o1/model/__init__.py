"""A real model around the library, to measure what a seal costs it; needs the extra `model`."""
