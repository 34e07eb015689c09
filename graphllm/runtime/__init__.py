"""Running plans: the executor, the decode loop, GPU offload planning, buffer guards."""
