"""What a run stands on outside of the model: the machine, devices, processes, memory, signals, random generators."""
