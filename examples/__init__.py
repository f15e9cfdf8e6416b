"""Examples for users: `reward: examples.closeness:score`, from the folder that holds `examples`."""
