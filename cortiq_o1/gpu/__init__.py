"""Plans on any GPU that wgpu reaches: adapters, shaders, buffers and the executor."""
