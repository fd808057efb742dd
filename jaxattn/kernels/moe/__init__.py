"""Mixture of experts: routing, grouped GEMMs that read only the used experts, and their sum."""
