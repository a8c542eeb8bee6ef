"""The command line `cortiq-o1`: each command makes its data first and renders it second."""
