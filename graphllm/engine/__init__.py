"""Token generation: requests, KV cache blocks, the engine that runs steps, stop conditions."""
