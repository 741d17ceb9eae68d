"""The decoding step of small models on a CPU, compiled from C on the machine that runs it."""
