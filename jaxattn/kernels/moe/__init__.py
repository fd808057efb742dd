"""Mixture of experts: routing, grouped products that read used experts alone, and their sum."""
