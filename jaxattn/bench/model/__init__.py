"""`python -m jaxattn.bench model NAME`: a whole model's steps, compared with their roofline."""
