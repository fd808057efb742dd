"""`python -m jaxattn.bench model NAME`: a whole model's steps beside the roof of their bytes."""
