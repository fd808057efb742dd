"""What tests share: inputs, oracles, models that are small enough to compile in seconds."""
