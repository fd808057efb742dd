"""From a model and limits to a warm engine: capacity, memory plan, parameters, warm-up."""
