"""Files to numbers: size, latency, throughput, memory and accuracy of the variants of one model."""
