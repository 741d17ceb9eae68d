"""Faster decoding steps of the torch engine: compiled code for small models on a CPU, and CUDA graphs."""

PROVIDES = {
    "engines": {
        "torch_native": "extras.compiled.step:build_native_step",
        "torch_graphs": "extras.compiled.graphs:StaticStep",
    }
}
