"""OpenAI's endpoints: the reading of their requests and the JSON of their responses."""
