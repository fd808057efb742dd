"""OpenAI's endpoints: the JSON that they read and write."""
