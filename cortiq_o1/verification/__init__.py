"""Whether an adapter computes the operator right: kernels against their twins, layers against float64."""
